"""Programs and types, where they depend on the jax version (0.10 to 0.12).

Only this file and `_platform.py` (devices, processes, compilers) use private names of jax, through `private`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
from jax import lax
from jax.extend.core import Literal
from jax.interpreters import partial_eval

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
    "ragged_all_to_all": "all_to_all",  # counted as if every row of the operand and the result were sent
    "ppermute": "ppermute",
    "pbroadcast": "broadcast",
}


@cache
def private(path: str) -> Any:
    """The private jax name `jax._src.<path>`, looked up on first use, so that importing shardkit needs none of them.

    Raises:
        ImportError: this version of jax has no such name.
    """
    module, name = path.rsplit(".", 1)
    try:
        return getattr(import_module(f"jax._src.{module}"), name)
    except (ImportError, AttributeError):
        raise ImportError(
            f"shardkit needs jax._src.{path}, which jax {jax.__version__} does not have. Install a supported version: "
            'pip install "jax>=0.10,<0.13".'
        ) from None


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which `x` may differ between devices, as check_vma tracks them."""
    aval = x if isinstance(x, jax.ShapeDtypeStruct | jax.core.AbstractValue) else jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    if manual is not None:
        return frozenset(manual.varying)
    return frozenset(getattr(aval, "vma", None) or ())


def tracked_axes() -> frozenset[str]:
    """The axes whose variation shard_map tracks here; vmap with an axis name tracks none."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def cast_varying(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Casts `x` to vary over `axes`, over none of which it may vary already: pcast is not idempotent."""
    return lax.pcast(x, axes, to="varying")


def invariant(aval: Any, axes: Sequence[str]) -> Any:
    """An abstract value without `axes` among those over which it varies."""
    manual = aval.manual_axis_type
    return aval.update(manual_axis_type=manual.update(varying=manual.varying - set(axes)))


def all_gather_replicated(x: jax.Array, axes: str | tuple[str, ...], dim: int) -> jax.Array:
    """A tiled all_gather whose result is invariant over `axes`."""
    if not tracked_axes() & set((axes,) if isinstance(axes, str) else axes):  # vmap tracks no axes
        return lax.all_gather(x, axes, axis=dim, tiled=True)
    return lax.all_gather(x, axes, axis=dim, tiled=True, to="invarying")


def bound_axes() -> dict[str, int]:
    """Names and sizes of the axes bound here by shard_map or vmap, in mesh order."""
    sizes = {name: size for name, size in private("core.get_axis_env")().axis_sizes.items() if isinstance(name, str)}
    mesh = jax.sharding.get_abstract_mesh().axis_names  # nested shard_maps bind axes in another order
    return {name: sizes[name] for name in sorted(sizes, key=lambda n: mesh.index(n) if n in mesh else len(mesh))}


def eval_jaxpr(jaxpr: Any, constants: Sequence[Any], *args: Any) -> list[Any]:
    """The results of a jaxpr, evaluated equation by equation."""
    return jax.core.eval_jaxpr(jaxpr, constants, *args)


def not_reached(jaxpr: Any, given: int, last: int) -> tuple[Any, list[bool]]:
    """What of a jaxpr follows from its first `given` arguments alone, inside its loops and calls too.

    Returns:
        A jaxpr of those arguments, whose results are those of the `last` results that follow from them; and for each of
        the `last` results whether it does not.
    """
    inputs, before = len(jaxpr.invars), len(jaxpr.outvars) - last
    reached = _reached(jaxpr, [k >= given for k in range(inputs)])
    moved = _marks(jaxpr.outvars[before:], reached)
    # An equation with an effect is never dead code: those that other arguments reach are taken out first.
    first = [e for e in jaxpr.eqns if not all(_marks(e.outvars, reached)) or not any(_marks(e.invars, reached))]
    still, _ = partial_eval.dce_jaxpr(
        jaxpr.replace(eqns=first),
        [False] * before + [not moves for moves in moved],
        instantiate=[True] * given + [False] * (inputs - given),
    )
    return still, moved


def _reached(jaxpr: Any, arguments: Sequence[bool]) -> set[Any]:
    """The variables of a jaxpr that depend on these arguments."""
    reached = {v for v, marked in zip(jaxpr.invars, arguments, strict=True) if marked}
    for equation in jaxpr.eqns:
        ins = _marks(equation.invars, reached)
        if any(ins):
            outs = _results_reached(equation, ins)
            reached.update(v for v, marked in zip(equation.outvars, outs, strict=True) if marked)
    return reached


def _marks(atoms: Sequence[Any], variables: set[Any]) -> list[bool]:
    return [not isinstance(atom, Literal) and atom in variables for atom in atoms]


def _results_reached(equation: Any, ins: list[bool]) -> list[bool]:
    def through(jaxpr: Any, arguments: Sequence[bool]) -> list[bool]:
        return _marks(jaxpr.outvars, _reached(jaxpr, arguments))

    name, inner = equation.primitive.name, [jaxpr for _, jaxpr in inner_jaxprs(equation)]
    if name in {*CALLS, "shard_map"} and len(inner) == 1 and len(inner[0].invars) == len(ins):
        return through(inner[0], ins)
    if name == "cond":
        return [ins[0] or any(branches) for branches in zip(*(through(each, ins[1:]) for each in inner), strict=True)]
    if name == "scan":
        first, carry = scan_parts(equation)
        last = first + carry
        while True:
            outs = through(inner[0], ins)
            carried = [a or b for a, b in zip(ins[first:last], outs[:carry], strict=True)]
            if carried == ins[first:last]:
                return [*carried, *outs[carry:]]
            ins[first:last] = carried
    return [True] * len(equation.outvars)


def arguments_used(jaxpr: Any) -> list[bool]:
    """For each argument of a jaxpr, whether any result depends on it."""
    return list(partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1])


# Primitives that call their only jaxpr with their operands.
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
    """The results of a jaxpr, evaluated equation by equation, with the functions that it calls inlined."""
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
    """The value of a literal or variable; None if a variable has none."""
    return atom.val if isinstance(atom, Literal) else values.get(atom)


@contextmanager
def made_by(equation: Any) -> Iterator[None]:
    """Traces with the source location and name stack of an equation."""
    source = equation.source_info
    names = private("source_info_util.current_name_stack")() + source.name_stack
    with private("source_info_util.user_context")(source.traceback, name_stack=names), equation.ctx.manager:
        yield


def bind(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of one equation."""
    with made_by(equation):
        results = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
    return list(results) if equation.primitive.multiple_results else [results]


def acts(equation: Any) -> bool:
    """Whether an equation has a side effect: it prints, or calls the host."""
    return any(not isinstance(effect, private("core.NamedAxisEffect")) for effect in equation.effects)


def inner_jaxprs(equation: Any) -> list[tuple[str, Any]]:
    """The jaxprs in an equation's parameters, with the parameters' names."""
    found = []
    for name, value in equation.params.items():
        for each in value if isinstance(value, tuple | list) else (value,):
            jaxpr = getattr(each, "jaxpr", each)
            if hasattr(jaxpr, "eqns"):
                found.append((name, jaxpr))
    return found


def inner_constants(equation: Any) -> list[Sequence[Any]]:
    """For each of `inner_jaxprs`, the arrays it closes over, in the order of its constvars."""
    found = []
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(each, "jaxpr", each), "eqns"):
                found.append(getattr(each, "consts", ()))
    return found


def user_frames(equation: Any) -> list[tuple[str, int, str]]:
    """File, line and function of an equation's frames outside jax, innermost first."""
    frames = private("source_info_util.user_frames")(equation.source_info.traceback)
    return [(frame.file_name, frame.start_line, frame.function_name) for frame in frames]


def in_backward(equation: Any) -> bool:
    """Whether an equation comes from transposition (the backward pass)."""
    return "transpose" in _transforms(equation)


def in_jvp(equation: Any) -> bool:
    """Whether an equation comes from differentiation: a tangent, or the primal next to it."""
    return "jvp" in _transforms(equation)


def recomputed(equation: Any) -> bool:
    """Whether an equation rematerializes the forward pass (jax.checkpoint)."""
    return any(scope.name == "rematted_computation" for scope in equation.source_info.name_stack.stack)


def _transforms(equation: Any) -> set[str]:
    """The jax transformations that an equation went through, without the user's named scopes of the same names."""
    return {each.name for each in equation.source_info.name_stack.stack if type(each).__name__ == "Transform"}


def made_by_pmap(equation: Any) -> bool:
    """Whether an equation was traced inside jax.pmap, which no longer has a primitive."""
    frames = equation.source_info.traceback.frames if equation.source_info.traceback else ()
    return any(Path(f.file_name).name == "pmap.py" and "jax" in Path(f.file_name).parts for f in frames)


def manual_axes(equation: Any) -> tuple[str, ...]:
    """The mesh axes that a shard_map equation binds."""
    return tuple(a for a in equation.params["mesh"].axis_names if a in equation.params["newly_manual_axes"])


def scan_parts(equation: Any) -> tuple[int, int]:
    """The number of a scan equation's constants, and of its carry."""
    if "ft_in" in equation.params:  # jax 0.12
        consts, carry, _ = equation.params["ft_in"].update(equation.invars).unpack()
        return len(list(consts)), len(list(carry))
    return equation.params["num_consts"], equation.params["num_carry"]
