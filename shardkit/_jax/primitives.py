"""The registry of primitives: what communicates, only changes a type, or depends on a mesh is a row of one table.

The census, lint, explain, emulate, pictures and the reader of compiled programs know primitives by it alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit._arguments.checks import quote
from shardkit._jax import compat
from shardkit._jax.ragged import describe_exchange, exchange_rows

# The primitive of `assume_replicated`.
ASSUMED = "assume_replicated"


class Primitive(NamedTuple):
    """What is known of a primitive."""

    name: str  # as in a traced program, without the "_p" with which some end
    # the collective that it is, as `cost.wire` counts it; None if it sends nothing. One of kind "ppermute" has its
    # pairs in the parameter `perm`.
    kind: str | None = None
    opcode: str = ""  # what XLA calls it; "" if XLA has none of its own
    differs: bool = False  # whether its result is another one on each device of its axes
    gradient: str | None = None  # the kind of collective that its transpose is; None if that sends nothing
    # the reason for that collective, in a sentence about a {value} and the axes, {over} or {along} which it is
    why: str = ""
    # `emulate(x, axes, params)` is the result for an operand under `jax.vmap` over named axes; None if there is no such
    # form. Where `sent` says how many of the operands are data, x is the list of all operands.
    emulate: Callable[[Any, tuple[str, ...], Any], Any] | None = None
    # the parameters that hold its mesh axes, a name or a tuple of names each
    axes: tuple[str, ...] = ("axes", "axis_name")
    dim: str = ""  # the parameter of a gather that holds the dim
    reduces: str = ""  # "sum", "maximum" or "minimum" of values that may be equal; "" for a sum of shares
    # how many of its operands are data, where others say what of them is sent; None: all, one for each result
    sent: int | None = None
    same: bool = False  # whether its results are its operands
    cast: bool = False  # whether it changes a type only
    asked: bool = False  # whether a cast is always written; jax adds the others where an operation needs them
    on_mesh: bool = False  # whether it depends on a mesh and sends nothing
    starts: bool = False  # whether its result is a future, of which another primitive gives the array
    waits: bool = False  # whether it gives the array of a future


# vmap reduces over a tuple of axes, as shard_map does. It gathers, scatters and permutes over one axis at a time, and
# permutes only if every device sends.
def _gather_tiled(x: Any, axes: tuple[str, ...], dim: int) -> Any:
    for name in reversed(axes):
        x = lax.all_gather(x, name, axis=dim, tiled=True)
    return x


def _gather(x: Any, axes: tuple[str, ...], params: Any) -> Any:
    dim = params["all_gather_dimension"]
    if not params["tiled"]:
        x = jnp.expand_dims(x, dim)
    return _gather_tiled(x, axes, dim)


def _scatter(x: Any, axes: tuple[str, ...], params: Any) -> Any:
    dim = params["scatter_dimension"]
    for name in axes:
        x = lax.psum_scatter(x, name, scatter_dimension=dim, tiled=True)
    if not params["tiled"]:
        x = jnp.squeeze(x, dim)
    return x


def _exchange(x: Any, axes: tuple[str, ...], params: Any) -> Any:
    x = jnp.where(lax.axis_index(axes) >= 0, x, x)  # vmap adds a dim to a value that is not mapped
    return lax.all_to_all(x, axes, params["split_axis"], params["concat_axis"], tiled=True)


def _permute(x: Any, axes: tuple[str, ...], params: Any) -> Any:
    sizes = compat.bound_axes()
    names = tuple(name for name in sizes if name in axes)  # ppermute counts devices in the mesh's order
    count = math.prod(sizes[name] for name in names)
    pairs = params["perm"]
    sources = [source for source, _ in pairs]
    targets = [target for _, target in pairs]
    for devices in (sources, targets):
        if len(set(devices)) < len(devices) or not set(devices) <= set(range(count)):
            raise ValueError(
                f"emulate: ppermute over {quote(names)} must name each of its {count} devices at most once as "
                f"source and once as target; got {pairs}. Remove duplicates and devices that do not exist."
            )
    if len(names) == 1 and len(targets) == count:
        return lax.ppermute(x, names[0], pairs)
    sender_of = np.full(count, -1)  # -1: nothing arrives
    sender_of[targets] = sources
    sender = jnp.asarray(sender_of)[lax.axis_index(names)]
    return jnp.where(sender >= 0, _gather_tiled(x[None], names, 0)[sender], jnp.zeros_like(x))


def _exchange_ragged(operands: Any, axes: tuple[str, ...], params: Any) -> Any:
    devices = math.prod(compat.bound_axes()[name] for name in axes)
    return exchange_rows(operands, describe_exchange(operands, axes, devices, params["axis_index_groups"]))


_SUM_REASON = "{value} is summed over {over} there without check_vma, where the gradient of a sum is a sum."
_GATHER_REASON = (
    "{value} is gathered over {over} there and each device uses the whole; its gradient is summed over the devices and "
    "split again."
)
_SCATTER_REASON = (
    "{value} is summed over {over} there and each device keeps a piece; its gradient gathers those of all pieces."
)
_EXCHANGE_REASON = "the pieces of {value} are exchanged over {over} there; their gradients are sent back."
_PERMUTE_REASON = "{value} is sent along {along} there; its gradient is sent back."
_REDUCE = Primitive("", "all_reduce", "all-reduce", why=_SUM_REASON, emulate=lambda x, axes, _: lax.psum(x, axes))
_GATHER = Primitive("", "all_gather", "all-gather", why=_GATHER_REASON, emulate=_gather, dim="all_gather_dimension")
_SCATTER = Primitive("", "reduce_scatter", "reduce-scatter", differs=True, why=_SCATTER_REASON, emulate=_scatter)
_EXCHANGE = Primitive("", "all_to_all", differs=True, gradient="all_to_all", why=_EXCHANGE_REASON)
_PERMUTE = Primitive("", "ppermute", differs=True, gradient="ppermute", why=_PERMUTE_REASON)
_SAME = Primitive("", same=True)
_CAST = Primitive("", same=True, cast=True)
# Those of jax 0.10 to 0.12, in the order in which pictures show their kinds.
_ROWS = (
    _GATHER._replace(name="all_gather", gradient="reduce_scatter"),
    _GATHER._replace(name="all_gather_reduced", gradient="reduce_scatter"),
    _GATHER._replace(name="all_gather_invariant"),
    _SCATTER._replace(name="reduce_scatter", gradient="all_gather"),
    _SCATTER._replace(name="unreduced_reduce_scatter"),
    _REDUCE._replace(name="psum", gradient="all_reduce", reduces="sum"),
    _REDUCE._replace(name="psum_invariant", reduces="sum"),
    _REDUCE._replace(name="unreduced_psum"),
    _REDUCE._replace(name="pmax", reduces="maximum", emulate=lambda x, axes, _: lax.pmax(x, axes)),
    _REDUCE._replace(name="pmin", reduces="minimum", emulate=lambda x, axes, _: lax.pmin(x, axes)),
    _EXCHANGE._replace(name="all_to_all", opcode="all-to-all", emulate=_exchange),
    _EXCHANGE._replace(name="ragged_all_to_all", opcode="ragged-all-to-all", emulate=_exchange_ragged, sent=1),
    _PERMUTE._replace(name="ppermute", opcode="collective-permute", emulate=_permute),
    Primitive("pbroadcast", "broadcast"),
    _CAST._replace(name="pvary", gradient="all_reduce"),
    _CAST._replace(name="reduced_vary_cast", gradient="all_reduce", asked=True),
    *(_CAST._replace(name=name) for name in ("preduced", "vary_unreduced_cast", ASSUMED)),
    *(_SAME._replace(name=name) for name in ("copy", "name", "optimization_barrier")),
    *(Primitive(name, on_mesh=True) for name in ("axis_index", "shard_map", "sharding_constraint")),
)
# Elementwise primitives: an element of a result depends on the elements of the operands at the same index only. They
# are linear in their one operand, linear in all operands together, or neither.
LINEAR = {"neg", "stop_gradient", "convert_element_type", "reduce_precision", "real", "imag", "conj", "copy_p"}
SUMS = {"add", "sub", "add_any"}
NONLINEAR = {
    *("abs", "acos", "acosh", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e"),
    *("bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex", "cos", "cosh", "digamma", "div", "eq"),
    *("eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igammac"),
    *("integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "log2", "logistic", "lt", "lt_to", "max"),
    *("min", "mul", "mulhi", "ne", "nextafter", "not", "or", "polygamma", "population_count", "pow"),
    *("regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic"),
    *("shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh", "threefry2x32", "xor", "zeta"),
}
ELEMENTWISE = LINEAR | SUMS | NONLINEAR
# The elements of the operand, in another shape or dtype perhaps.
VIEWS = {"broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze", "transpose"}

TABLE: dict[str, Primitive] = {}
KIND_OF_OPCODE: dict[str, str] = {}


def register(row: Primitive) -> None:
    """Adds a row, for all that read programs. Internal: rows of shardkit are above, tests add theirs."""
    TABLE[row.name.removesuffix("_p")] = row
    if row.kind and row.opcode:
        KIND_OF_OPCODE[row.opcode] = row.kind


def _start(row: Primitive) -> Primitive:
    """The row of the primitive that starts a collective, and does not wait for its result: `psum_scatter_start`."""
    return row._replace(name=f"{row.name}_start", opcode="", gradient=None, why="", starts=True)


# The collectives that jax can start, and those whose future it can await.
_STARTED = ("all_gather", "all_gather_reduced", "psum_invariant", "reduce_scatter", "all_to_all", "ppermute")
_AWAITED = ("all_gather", "psum", "reduce_scatter", "all_to_all", "ppermute")

for _row in _ROWS:
    register(_row)
if hasattr(lax, "psum_scatter_start"):  # before jax 0.12 all are private, and a future has no shape
    for _name in _STARTED:
        register(_start(TABLE[_name]))
    for _name in _AWAITED:
        register(_SAME._replace(name=f"{_name}_done", waits=True))
_UNKNOWN = Primitive("")


def registered(name: str) -> Primitive:
    """The row of a primitive, by its name; one without a name if there is none."""
    return TABLE.get(name.removesuffix("_p"), _UNKNOWN)
