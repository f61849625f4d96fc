"""Programs and types, where they depend on the jax version (0.10 to 0.12).

Private names of jax are looked up by `private` alone, here, in `backends.py` (devices, processes, compilers), in
`relocation.py` and in `sealed.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax
from jax import lax
from jax.extend.core import Literal
from jax.extend.mlir import hlo_to_stablehlo
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardkit._arguments.checks import Axis, axis_names, quote

# The scope of the casts that `vary` makes.
ASKED = "shardkit_vary"
_PMAP = str(Path(jax.__file__).parent / "_src" / "pmap.py")


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


def abstract_mesh_of(mesh: Mesh | AbstractMesh) -> AbstractMesh:
    """A mesh without its devices."""
    return mesh.abstract_mesh if isinstance(mesh, Mesh) else mesh


def find_deleted(leaves: Sequence[Any]) -> Any:
    """The first array whose memory is given away; None if there is none.

    A step asks at every call: without a loop in Python, the 32 leaves of a small step take 1 us instead of 3.
    """
    array_type = private("array.ArrayImpl")
    try:
        if not any(map(array_type.is_deleted, leaves)):
            return None
    except TypeError:  # a leaf that is no array of jax, such as one of the host, or a tracer
        pass
    for x in leaves:
        if type(x) is array_type and x.is_deleted():
            return x
    return None


_read_sharding = attrgetter("_sharding")  # what the property `sharding` returns, which is a function of Python


def layouts_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """The sharding of each leaf, None for one that has none; as fast as `find_deleted`."""
    try:
        return tuple(map(_read_sharding, leaves))
    except AttributeError:
        return tuple(getattr(x, "sharding", None) for x in leaves)


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which `x` may differ between devices, as check_vma tracks them."""
    aval = x
    if not isinstance(x, jax.ShapeDtypeStruct | jax.core.AbstractValue):
        aval = jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)
    if manual is not None:
        return frozenset(manual.varying)
    return frozenset(getattr(aval, "vma", None) or ())


def eval_shape(fn: Callable[..., Any], *args: Any) -> Any:
    """`jax.eval_shape`, whose results can be traced again also where some axes are Manual and others are not."""
    return on_this_mesh(jax.eval_shape(fn, *args))


def on_this_mesh(shapes: Any) -> Any:
    """ShapeDtypeStructs that know the mesh; jax leaves it out where some axes are Auto, and then refuses them."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes or mesh.are_all_axes_manual:
        return shapes
    replicated = NamedSharding(mesh, PartitionSpec())

    def name_mesh(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return x.update(sharding=replicated) if x.sharding is None else x

    return jax.tree.map(name_mesh, shapes)


def tracked_axes() -> frozenset[str]:
    """The axes whose variation shard_map tracks here; vmap with an axis name tracks none."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def cast_varying(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Casts `x` to vary over `axes`, over none of which it may vary already: pcast is not idempotent."""
    with jax.named_scope(ASKED):
        return lax.pcast(x, axes, to="varying")


def invariant(aval: Any, axes: Sequence[str]) -> Any:
    """An abstract value without `axes` among those over which it varies."""
    manual = aval.manual_axis_type
    return aval.update(manual_axis_type=manual.update(varying=manual.varying - set(axes)))


def with_varying(aval: Any, axes: frozenset[str]) -> Any:
    """An abstract value that varies over these axes, and over no other; one without a mesh gets this one."""
    mesh = jax.sharding.get_abstract_mesh()
    if axes and aval.sharding.mesh.empty:
        aval = aval.update(sharding=NamedSharding(mesh, PartitionSpec()))
    return aval.update(manual_axis_type=aval.manual_axis_type.update(varying=axes))


@contextmanager
def untracked() -> Iterator[None]:
    """Traces inside have no varying types, as with check_vma=False."""
    with private("config._check_vma")(False):
        yield


def all_gather_replicated(x: jax.Array, axes: str | tuple[str, ...], dim: int) -> jax.Array:
    """A tiled all_gather whose result is invariant over `axes`."""
    names = (axes,) if isinstance(axes, str) else axes
    if not tracked_axes() & set(names):  # vmap tracks no axes
        return lax.all_gather(x, axes, axis=dim, tiled=True)
    return lax.all_gather(x, axes, axis=dim, tiled=True, to="invarying")


def is_tracing() -> bool:
    """Whether jax is tracing a function, as under jit, so that what is computed has no numbers yet."""
    return not private("core.trace_state_clean")()


def bound_axes() -> dict[str, int]:
    """Names and sizes of the axes bound here by shard_map or vmap, in mesh order."""
    bound_sizes = private("core.get_axis_env")().axis_sizes
    sizes = {}
    for name in jax.sharding.get_abstract_mesh().axis_names:  # nested shard_maps bind axes in another order
        if name in bound_sizes:
            sizes[name] = bound_sizes[name]
    for name, size in bound_sizes.items():  # those of vmap
        if isinstance(name, str):
            sizes.setdefault(name, size)
    return sizes


class UnboundAxisError(ValueError):
    """A collective is called over an axis that no shard_map or vmap binds."""


def bound(where: str, axis: Axis) -> tuple[str, ...]:
    """The axis names as a tuple, all of them bound by the surrounding shard_map (or vmap)."""
    names = axis_names(where, axis)
    sizes = bound_axes()
    for name in names:
        if name in sizes:
            continue
        if not sizes:
            raise UnboundAxisError(
                f"{where}: axis {name!r} is not bound here, because no shard_map surrounds this call. "
                "Call it inside jax.shard_map over a mesh with that axis."
            )
        raise UnboundAxisError(
            f"{where}: axis {name!r} is not an axis of this mesh; its axes are {quote(sizes)}. "
            "Use one of them, or add the axis to make_mesh."
        )
    return names


def arguments_used(jaxpr: Any) -> list[bool]:
    """For each argument of a jaxpr, whether any result depends on it."""
    all_results = [True] * len(jaxpr.outvars)
    _, used = partial_eval.dce_jaxpr(jaxpr, all_results)
    return list(used)


# The primitive of `as_on_one_device`.
ONE_DEVICE = "as_on_one_device"
# The primitive of equations that `expand_equation` expands.
HIGH_LEVEL = "call_hi_primitive"
# The primitive of `jax.lax.custom_linear_solve`. It computes by its function `solve`; its other functions say what its
# derivatives are.
SOLVE = "custom_linear_solve"
# Primitives that call their only jaxpr with their operands.
CALLS = {
    ONE_DEVICE,
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
    "eval_jaxpr",
    "program_order",  # jax.experimental.overlap
    "xla_metadata_call",  # jax.experimental.scheduling_groups
}


def value_of(atom: Any, values: Mapping[Any, Any]) -> Any:
    """The value of a literal or variable; None if a variable has none."""
    return atom.val if isinstance(atom, Literal) else values.get(atom)


@contextmanager
def trace_as_equation(equation: Any) -> Iterator[None]:
    """Traces with the source location and name stack of an equation."""
    source = equation.source_info
    names = private("source_info_util.current_name_stack")() + source.name_stack
    with private("source_info_util.user_context")(source.traceback, name_stack=names), equation.ctx.manager:
        yield


def bind(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of one equation."""
    with trace_as_equation(equation):
        results = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
    if equation.primitive.multiple_results:
        return list(results)
    return [results]


def acts(equation: Any) -> bool:
    """Whether an equation has a side effect: it prints, or calls the host."""
    return any(not isinstance(effect, private("core.NamedAxisEffect")) for effect in equation.effects)


def calls_python(equation: Any) -> bool:
    """Whether an equation has a side effect or calls Python; `jax.pure_callback` does, and declares no effect."""
    return acts(equation) or equation.primitive.name == "pure_callback"


def inner_programs(equation: Any) -> list[Any]:
    """The programs that an equation runs: jaxprs, closed ones where it keeps the arrays that they close over."""
    return [program for _, program in _programs(equation)]


def inner_jaxprs(equation: Any) -> list[tuple[str, Any]]:
    """The jaxprs that an equation runs, with the names of its parameters that hold them."""
    return [(name, getattr(program, "jaxpr", program)) for name, program in _programs(equation)]


def inner_constants(equation: Any) -> list[Sequence[Any]]:
    """For each of `inner_jaxprs`, the arrays it closes over, in the order of its constvars."""
    return [getattr(program, "consts", ()) for _, program in _programs(equation)]


def _programs(equation: Any) -> Iterator[tuple[str, Any]]:
    for name, value in equation.params.items():
        if equation.primitive.name == SOLVE:
            # Of its four functions (matvec, vecmat, solve, transpose_solve) only this one runs.
            value = getattr(value, "solve", value)
        items = value if isinstance(value, tuple | list) else (value,)
        for item in items:
            if hasattr(getattr(item, "jaxpr", item), "eqns"):
                yield name, item


@lru_cache(64)
def expand_equation(equation: Any) -> Any:
    """The closed jaxpr that an equation of a high-level primitive stands for, as searchsorted is one in jax 0.12."""
    primitive = equation.params["_prim"]

    def program(*operands: Any) -> list[Any]:
        args = jax.tree.unflatten(primitive.in_tree, operands)
        return jax.tree.leaves(primitive.expand(*args))

    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars]
    return jax.make_jaxpr(program)(*shapes)


def reaches_others(equation: Any) -> bool:
    """Whether an equation may send to other devices by itself.

    A Pallas kernel's copy or signal that names a device does, as does its access to the memory of several devices; a
    foreign call that declares an effect may. One that declares none must be free to be left out or repeated, which no
    exchange between devices survives.
    """
    params = equation.params
    match equation.primitive.name:
        case "dma_start":
            *_, device = params["tree"].unflatten(equation.invars)
            return device is not None
        case "semaphore_signal":
            *_, device, _ = params["args_tree"].unflatten(equation.invars)
            return device is not None
        case "ffi_call":
            return bool(params["has_side_effect"])
    return equation.primitive.name in ("multimem_store", "multimem_load_reduce", "semaphore_signal_multicast")


def user_frames(equation: Any) -> list[tuple[str, int, str]]:
    """File, line and function of an equation's frames outside jax, innermost first."""
    return frames_of(equation.source_info.traceback)


def frames_of(traceback: Any) -> list[tuple[str, int, str]]:
    """The same of a traceback, as an equation keeps it."""
    frames = private("source_info_util.user_frames")(traceback)
    return [(frame.file_name, frame.start_line, frame.function_name) for frame in frames]


def is_function_of_jax(jaxpr: Any) -> bool:
    """Whether a jaxpr is that of a function of jax itself: defined where `user_frames` sees no line of a user."""
    file = jaxpr.debug_info.func_filename
    return file is not None and not private("source_info_util.is_user_filename")(file)


def in_backward(equation: Any) -> bool:
    """Whether an equation comes from transposition (the backward pass)."""
    return "transpose" in transforms(equation)


def in_jvp(equation: Any) -> bool:
    """Whether an equation comes from differentiation: a tangent, or the primal next to it."""
    return "jvp" in transforms(equation)


def is_recomputed(equation: Any) -> bool:
    """Whether an equation rematerializes the forward pass (jax.checkpoint)."""
    return in_scope(equation, "rematted_computation")


def in_scope(equation: Any, name: str) -> bool:
    """Whether an equation was traced under `jax.named_scope(name)`, or follows from one that was."""
    return name in scopes(equation)


def scopes(equation: Any) -> frozenset[str]:
    """The names under which an equation was traced: of `jax.named_scope`, and of transformations it went through.

    The names begin anew in an inner program, such as the body of a scan.
    """
    return frozenset(entry.name for entry in equation.source_info.name_stack.stack)


def innermost_scope(equation: Any) -> str:
    """The innermost `jax.named_scope` of an equation, or transformation that it went through; "" if there is none."""
    stack = equation.source_info.name_stack.stack
    if not stack:
        return ""
    return str(stack[-1].name)


def transforms(equation: Any) -> list[str]:
    """The jax transformations that an equation went through, outermost first, without named scopes of their names."""
    stack = equation.source_info.name_stack.stack
    return [entry.name for entry in stack if type(entry).__name__ == "Transform"]


def is_made_by_pmap(equation: Any) -> bool:
    """Whether an equation is a call that was traced inside jax.pmap, which no longer has a primitive."""
    if equation.primitive.name not in ("jit", "pjit"):
        return False
    traceback = equation.source_info.traceback
    return traceback is not None and any(frame.file_name == _PMAP for frame in traceback.frames)


def manual_axes(equation: Any) -> tuple[str, ...]:
    """The mesh axes that a shard_map equation binds."""
    newly_manual = equation.params["newly_manual_axes"]
    return tuple(axis for axis in equation.params["mesh"].axis_names if axis in newly_manual)


def scan_parts(equation: Any) -> tuple[int, int]:
    """The number of a scan equation's constants, and of its carry."""
    if "ft_in" in equation.params:  # jax 0.12
        consts, carry, _ = equation.params["ft_in"].update(equation.invars).unpack()
        return len(list(consts)), len(list(carry))
    return equation.params["num_consts"], equation.params["num_carry"]


def parse_hlo(serialized: bytes) -> Any:
    """The StableHLO of a serialized HloModuleProto, as a module of typed operations.

    Raises:
        ValueError: jaxlib cannot write the module as StableHLO, or cannot parse what it wrote.
    """
    ir = private("interpreters.mlir.ir")
    context = private("interpreters.mlir.make_ir_context")()
    context.allow_unregistered_dialects = True
    with context:
        try:
            stablehlo = hlo_to_stablehlo(serialized)
            return ir.Module.parse(stablehlo)
        except (ir.MLIRError, jax.errors.JaxRuntimeError) as error:
            raise ValueError(f"parse_hlo: jaxlib must read what it writes; {error}") from error


def places_of_pieces(sharding: bytes, shape: tuple[int, ...], devices: int) -> list[tuple[slice, ...]]:
    """The place of each device's piece of an array by a serialized OpSharding; b"" is all of it on every device."""
    xla_client = private("lib.xla_client")
    proto = xla_client.OpSharding()
    proto.ParseFromString(sharding)
    hlo_sharding = xla_client.HloSharding.from_proto(proto)
    # jax 0.12 may name the axes of a mesh, and reads places of the older form alone.
    to_tiles = getattr(xla_client.HloSharding, "v3_to_v2_sharding", None)
    if to_tiles is not None:
        hlo_sharding = to_tiles(hlo_sharding)
    indices = private("op_shardings.op_sharding_to_numpy_indices")
    return list(indices(hlo_sharding, shape, devices).flat)


def hlo_dimensions(kind: str, attribute: Any) -> Any:
    """An attribute of "Gather", "Scatter", "Dot" or "Conv" that names dims, as an object."""
    dialect = private("interpreters.mlir.hlo")
    return getattr(dialect, f"{kind}DimensionNumbers")(attribute)


def hlo_text(attribute: Any) -> str:
    """The word that an attribute of StableHLO is, as "LT" of a comparison."""
    dialect = private("interpreters.mlir.hlo")
    for kind in (dialect.ComparisonDirectionAttr, dialect.ComparisonTypeAttr):
        if kind.isinstance(attribute):
            return kind(attribute).value
    return str(attribute)


def device_assignment(shardings: Sequence[Any]) -> list[Any]:
    """The devices of a compiled program, in the order in which its module numbers them, by the shardings of arrays."""
    for sharding in shardings:
        if sharding is not None:
            return list(sharding._device_assignment)
    raise ValueError("a compiled program must have an argument or a result")


def key_impl(dtype: Any) -> Any:
    """The implementation of the random numbers of keys of a dtype, as `jax.random.wrap_key_data` takes it."""
    return dtype._impl


def less_in_total_order(x: Any, y: Any) -> Any:
    """x < y in IEEE's total order, in which -0 is less than 0."""
    return private("lax.lax.lt_to_p").bind(x, y)


def at_most_in_total_order(x: Any, y: Any) -> Any:
    """x <= y in IEEE's total order."""
    return private("lax.lax.le_to_p").bind(x, y)


def dynamic_slice(x: Any, starts: Sequence[Any], sizes: tuple[int, ...]) -> Any:
    """A slice at starts that count from the front alone: jax's own function lets negative ones count from the end."""
    return private("lax.slicing.dynamic_slice_p").bind(x, *starts, slice_sizes=sizes)


def dynamic_update_slice(x: Any, update: Any, starts: Sequence[Any]) -> Any:
    """An array with a slice replaced, at starts that count from the front alone."""
    return private("lax.slicing.dynamic_update_slice_p").bind(x, update, *starts)
