"""Programs and types, in what depends on the jax version (0.10 to 0.12).

Only this file and `_platform.py` (devices, processes, compilers) import jax privately.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax import lax
from jax._src import core as _core
from jax._src import source_info_util as _source_info_util
from jax._src.dtypes import ExtendedDType as ExtendedDType
from jax._src.interpreters import partial_eval as _partial_eval

# jax's primitives that communicate, under the names that shardkit gives the operations.
COLLECTIVES = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_gather_reduced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "unreduced_psum": "all_reduce",
    "unreduced_reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "all_to_all",  # counted as if a device sent all that its operand and its result can hold
    "ppermute": "ppermute",
    "pbroadcast": "broadcast",
}


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which `x` may differ between devices, as check_vma tracks them."""
    aval = x if isinstance(x, jax.ShapeDtypeStruct | _core.AbstractValue) else jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    if manual is not None:
        return frozenset(manual.varying)
    return frozenset(getattr(aval, "vma", None) or ())


def tracked_axes() -> frozenset[str]:
    """The axes that shard_map tracks here; under vmap with an axis name nothing is tracked."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def cast_varying(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Marks `x` as varying over `axes`; every one must be missing, since pcast is not idempotent."""
    return lax.pcast(x, axes, to="varying")


def all_gather_replicated(x: jax.Array, axes: str | tuple[str, ...], dim: int) -> jax.Array:
    """A tiled all_gather whose result is typed as equal on all devices of `axes`."""
    if not tracked_axes() & set((axes,) if isinstance(axes, str) else axes):  # nothing has a type under vmap
        return lax.all_gather(x, axes, axis=dim, tiled=True)
    return lax.all_gather(x, axes, axis=dim, tiled=True, to="invarying")


def bound_axes() -> dict[str, int]:
    """Names and sizes of the axes bound here by shard_map or vmap, in mesh order."""
    sizes = {name: size for name, size in _core.get_axis_env().axis_sizes.items() if isinstance(name, str)}
    mesh = jax.sharding.get_abstract_mesh().axis_names  # shard_maps inside each other bind in another order
    return {name: sizes[name] for name in sorted(sizes, key=lambda n: mesh.index(n) if n in mesh else len(mesh))}


def eval_jaxpr(jaxpr: Any, constants: Sequence[Any], *args: Any) -> list[Any]:
    """The results of a jaxpr, equation by equation."""
    return _core.eval_jaxpr(jaxpr, constants, *args)


def not_reached(jaxpr: Any, given: int, last: int) -> tuple[Any, list[bool]]:
    """What of a jaxpr follows from its first `given` arguments alone, inside its loops too.

    Returns:
        A jaxpr of those arguments, whose results are those of the `last` results that follow from them; and for each of
        the `last` results whether it does not.
    """
    results, inputs = len(jaxpr.outvars), len(jaxpr.invars)

    def needs(used: list[bool]) -> tuple[Any, list[bool]]:
        return _partial_eval.dce_jaxpr(jaxpr, used, instantiate=[True] * given + [False] * (inputs - given))

    moved = [any(needs([i == k for i in range(results)])[1][given:]) for k in range(results - last, results)]
    still, _ = needs([False] * (results - last) + [not moves for moves in moved])
    return still, moved


def arguments_used(jaxpr: Any) -> list[bool]:
    """For each argument of a jaxpr whether any of its results depends on it."""
    return list(_partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1])


# Primitives that call their only jaxpr with the operands that it takes, one to one.
CALLS = {
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "remat",
    "remat2",
    "checkpoint",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
}


def inlined(jaxpr: Any, constants: Sequence[Any], *args: Any) -> list[Any]:
    """The results of a jaxpr, equation by equation, those of the functions that it calls included."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *args), strict=True))
    for equation in jaxpr.eqns:
        operands, inner = [value_of(v, values) for v in equation.invars], inner_jaxprs(equation)
        if equation.primitive.name in CALLS and len(inner) == 1 and len(inner[0][1].invars) == len(operands):
            with made_by(equation):
                results = inlined(inner[0][1], inner_constants(equation)[0], *operands)
        else:
            results = bind(equation, operands)
        values.update(zip(equation.outvars, results, strict=True))
    return [value_of(v, values) for v in jaxpr.outvars]


def value_of(atom: Any, values: Mapping[Any, Any]) -> Any:
    """The value of a literal or of a variable; None for a variable that has none."""
    return atom.val if isinstance(atom, _core.Literal) else values.get(atom)


@contextmanager
def made_by(equation: Any) -> Iterator[None]:
    """Traces as if the user's line of an equation had made what is made inside."""
    source = equation.source_info
    names = _source_info_util.current_name_stack() + source.name_stack
    with _source_info_util.user_context(source.traceback, name_stack=names), equation.ctx.manager:
        yield


def bind(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of one equation."""
    with made_by(equation):
        results = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
    return list(results) if equation.primitive.multiple_results else [results]


def acts(equation: Any) -> bool:
    """Whether an equation does something besides its results: it prints, or calls the host."""
    return any(not isinstance(effect, _core.NamedAxisEffect) for effect in equation.effects)


def inner_jaxprs(equation: Any) -> list[tuple[str, Any]]:
    """The jaxprs among an equation's parameters, each with the parameter's name."""
    found = []
    for name, value in equation.params.items():
        for each in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(each, "jaxpr", each)
            if hasattr(jaxpr, "eqns"):
                found.append((name, jaxpr))
    return found


def inner_constants(equation: Any) -> list[Sequence[Any]]:
    """The arrays that each of `inner_jaxprs` closes over, in the order of its constvars."""
    found = []
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(each, "jaxpr", each), "eqns"):
                found.append(getattr(each, "consts", ()))
    return found


def user_frames(equation: Any) -> list[tuple[str, int, str]]:
    """File, line and function of the frames outside jax that made an equation, innermost first."""
    frames = _source_info_util.user_frames(equation.source_info.traceback)
    return [(frame.file_name, frame.start_line, frame.function_name) for frame in frames]


def in_backward(equation: Any) -> bool:
    """Whether an equation was made by transposing (the backward pass)."""
    return "transpose" in _transforms(equation)


def in_jvp(equation: Any) -> bool:
    """Whether an equation was made by differentiating: a tangent, or the primal beside it."""
    return "jvp" in _transforms(equation)


def recomputed(equation: Any) -> bool:
    """Whether an equation repeats one of the forward pass for the backward pass (jax.checkpoint)."""
    return any(scope.name == "rematted_computation" for scope in equation.source_info.name_stack.stack)


def _transforms(equation: Any) -> set[str]:
    """jax's transformations that an equation went through; a scope that the user names may be called the same."""
    return {each.name for each in equation.source_info.name_stack.stack if type(each).__name__ == "Transform"}


def made_by_pmap(equation: Any) -> bool:
    """Whether an equation was traced inside jax.pmap, which has no primitive of its own any more."""
    frames = equation.source_info.traceback.frames if equation.source_info.traceback else ()
    return any(Path(f.file_name).name == "pmap.py" and "jax" in Path(f.file_name).parts for f in frames)


def manual_axes(equation: Any) -> tuple[str, ...]:
    """The mesh axes that a shard_map equation binds."""
    return tuple(a for a in equation.params["mesh"].axis_names if a in equation.params["newly_manual_axes"])


def scan_parts(equation: Any) -> tuple[int, int]:
    """How many operands of a scan equation are constants of the loop, and how many are its carry."""
    if "ft_in" in equation.params:  # jax 0.12
        consts, carry, _ = equation.params["ft_in"].update(equation.invars).unpack()
        return len(list(consts)), len(list(carry))
    return equation.params["num_consts"], equation.params["num_carry"]
