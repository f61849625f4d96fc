"""A small language of programs on arrays, and their functions in jax; `evaluation` has their values by numpy.

A program is a tree of nodes; a kernel's has the shapes of one device, and collectives. For example the sum of the
squares of the rows of two devices:

    x = named("input", (2, 3), "f", params=(0,))
    total = psum(reduced("sum", mul(x, x), 0))      # one device's rows, then those of both
    function = built(total)                         # of its 2 rows, for jax.shard_map
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit._jax import compat

AXIS = "d"
INFINITE = 1e9  # constants beyond it are infinite in a proof, and so they are here
DTYPES = {"f": np.float32, "i": np.int32, "b": np.bool_}


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """An operation on the values of other nodes.

    Attributes:
        op: its name, a row of `_JAX` and of `Evaluation`.
        args: the nodes of its operands.
        shape: the shape of its value, on one device.
        kind: "f", "i" or "b": what its value consists of.
        params: what else it needs.
    """

    op: str
    args: tuple["Node", ...]
    shape: tuple[int, ...]
    kind: str
    params: tuple[Any, ...] = ()

    def __str__(self) -> str:
        if self.op == "input":
            return "xyzuvw"[self.params[0]]
        if self.op == "constant":
            value = uniform(self)
            return f"{value:g}" if value is not None else str(self.params[0].tolist()).replace(" ", "")
        inner = [str(each) for each in self.args]
        inner += [str(each).replace(" ", "") for each in self.params]
        return f"{self.op}({', '.join(inner)})"


# Makers of nodes


def named(op: str, shape: Sequence[int], kind: str, *args: Node, params: tuple[Any, ...] = ()) -> Node:
    """A node with everything said."""
    return Node(op, args, tuple(shape), kind, params)


def constant(value: Any, shape: Sequence[int] = (), kind: str = "f") -> Node:
    """A constant, of one value or of an array's."""
    dtype = {"f": np.float64, "i": np.int64, "b": np.bool_}[kind]
    return named("constant", shape, kind, params=(np.broadcast_to(np.asarray(value, dtype), tuple(shape)),))


def same(op: str, *args: Node, kind: str | None = None) -> Node:
    """An elementwise operation."""
    return named(op, args[-1].shape, kind or args[-1].kind, *args)


def add(x: Node, y: Node) -> Node:
    """x + y."""
    return same("add", x, y)


def sub(x: Node, y: Node) -> Node:
    """x - y."""
    return same("sub", x, y)


def mul(x: Node, y: Node) -> Node:
    """x * y."""
    return same("mul", x, y)


def div(x: Node, y: Node) -> Node:
    """x / y."""
    return same("div", x, y)


def compared(op: str, x: Node, y: Node) -> Node:
    """A comparison: lt, le, gt, ge, eq or ne."""
    return same(op, x, y, kind="b")


def where(mask: Node, x: Node, y: Node) -> Node:
    """x where the mask holds, else y."""
    return same("where", mask, x, y)


def like(x: Node, value: Any) -> Node:
    """A constant of another's shape and kind."""
    return constant(value, x.shape, x.kind)


def cast(x: Node, kind: str) -> Node:
    """The value as floats, or as integers: towards zero."""
    return x if x.kind == kind else same("cast", x, kind=kind)


def without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    """A shape less one dim."""
    return (*shape[:dim], *shape[dim + 1 :])


def resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    """A shape whose dim has another size."""
    return (*shape[:dim], size, *shape[dim + 1 :])


def reduced(op: str, x: Node, dim: int) -> Node:
    """sum, largest, smallest or argmax over a dim."""
    return named(op, without(x.shape, dim), "i" if op == "argmax" else x.kind, x, params=(dim,))


def along(op: str, x: Node, dim: int) -> Node:
    """cumsum, sort or rev along a dim."""
    return named(op, x.shape, x.kind, x, params=(dim,))


def spread(x: Node, shape: Sequence[int], dims: Sequence[int]) -> Node:
    """A broadcast: the dims of x are these of the result."""
    return named("spread", shape, x.kind, x, params=(tuple(dims),))


def kept(x: Node, shape: Sequence[int], dim: int) -> Node:
    """What was reduced over a dim, at each of its places again."""
    return spread(x, shape, [each for each in range(len(shape)) if each != dim])


def cut(x: Node, dim: int, start: int, stop: int) -> Node:
    """A slice."""
    return named("cut", resized(x.shape, dim, stop - start), x.kind, x, params=(dim, start, stop))


def joined(parts: Sequence[Node], dim: int) -> Node:
    """Arrays one behind the other."""
    size = sum(each.shape[dim] for each in parts)
    return named("joined", resized(parts[0].shape, dim, size), parts[0].kind, *parts, params=(dim,))


def taken(x: Node, at: Node, outside: str) -> Node:
    """Rows at integers; `outside` says what is read out of bounds: "nan", "zero" or the "nearest"."""
    return named("taken", (*at.shape, *x.shape[1:]), x.kind, x, at, params=(outside,))


def window(x: Node, start: Node, size: int) -> Node:
    """Some rows, from one on."""
    return named("window", resized(x.shape, 0, size), x.kind, x, start, params=(size,))


def psum(x: Node) -> Node:
    """The sum over devices."""
    return named("psum", x.shape, x.kind, x)


def gathered(x: Node, devices: int) -> Node:
    """The rows of all devices."""
    return named("all_gather", resized(x.shape, 0, x.shape[0] * devices), x.kind, x)


def sent(x: Node, pairs: Sequence[tuple[int, int]]) -> Node:
    """ppermute; who receives nothing has zeros."""
    return named("ppermute", x.shape, x.kind, x, params=(tuple(pairs),))


def index() -> Node:
    """The number of the device."""
    return named("axis_index", (), "i")


# Looking at nodes


def every(root: Node) -> list[Node]:
    """All nodes below one and itself, each once, operands first."""
    seen: dict[int, Node] = {}

    def visit(node: Node) -> None:
        if id(node) in seen:
            return
        for each in node.args:
            visit(each)
        seen[id(node)] = node

    visit(root)
    return list(seen.values())


def replaced(root: Node, old: Node, new: Node) -> Node:
    """A tree with another node in the place of one, wherever it is used."""
    done = {id(old): new}

    def visit(node: Node) -> Node:
        if id(node) not in done:
            args = tuple(visit(each) for each in node.args)
            changed = any(a is not b for a, b in zip(args, node.args, strict=True))
            done[id(node)] = dataclasses.replace(node, args=args) if changed else node
        return done[id(node)]

    return visit(root)


def uniform(node: Node) -> float | None:
    """The one value of a constant; None for all else."""
    if node.op != "constant" or node.params[0].size == 0:
        return None
    value = node.params[0]
    return float(value.flat[0]) if (value == value.flat[0]).all() else None


# As a function in jax


def _take(node: Node, x: Any, at: Any) -> Any:
    offsets = tuple(range(len(node.args[1].shape), len(node.shape)))
    numbers = lax.GatherDimensionNumbers(offset_dims=offsets, collapsed_slice_dims=(0,), start_index_map=(0,))
    sizes = (1, *node.args[0].shape[1:])
    [outside] = node.params
    mode = "clip" if outside == "nearest" else "fill"
    fill = {"nan": np.nan, "zero": 0, "nearest": None}[outside]
    return lax.gather(x, lax.expand_dims(at, [at.ndim]), numbers, sizes, mode=mode, fill_value=fill)


def _scan(node: Node, x: Any) -> Any:
    body, keep = node.params

    def step(carry: Any, row: Any) -> Any:
        carry = rounded(body, keep, carry, row, lax.max)
        return carry, carry

    first = lax.full(node.shape[1:], np.float32(0))
    over = tuple(compat.varying_axes(x))
    first = compat.cast_varying(first, over) if over else first
    return lax.scan(step, first, x)[1]


def rounded(body: str, keep: float, carry: Any, row: Any, larger: Callable[[Any, Any], Any]) -> Any:
    """A round of a scan: a decayed sum, one that is never negative, or a decayed maximum."""
    decayed = np.float32(keep) * carry if larger is lax.max else keep * carry
    if body == "sum":
        return decayed + row
    if body == "relu":
        return larger(decayed + row, 0 * row)
    return larger(decayed, row)


def _noise(node: Node, number: Any) -> Any:
    return jax.random.uniform(jax.random.fold_in(jax.random.key(node.params[0]), number), node.shape)


def _held(node: Node) -> Any:
    value = node.params[0]
    if value.size and (value == value.flat[0]).all():
        return lax.full(node.shape, DTYPES[node.kind](value.flat[0]))
    return jnp.asarray(value.astype(DTYPES[node.kind]))


_BINARY = {
    "add": lax.add, "sub": lax.sub, "mul": lax.mul, "div": lax.div, "max": lax.max, "min": lax.min,
    "lt": lax.lt, "le": lax.le, "gt": lax.gt, "ge": lax.ge, "eq": lax.eq, "ne": lax.ne,
    "and": lax.bitwise_and, "or": lax.bitwise_or,
}  # fmt: skip
_UNARY = {
    "neg": lax.neg, "exp": lax.exp, "log": lax.log, "abs": lax.abs, "floor": lax.floor, "not": lax.bitwise_not,
    "tanh": lax.tanh,
}  # fmt: skip
_JAX: dict[str, Callable[..., Any]] = {
    **{name: (lambda node, *xs, _f=f: _f(*xs)) for name, f in {**_BINARY, **_UNARY}.items()},
    "constant": _held,
    "where": lambda node, mask, x, y: lax.select(mask, x, y),
    "cast": lambda node, x: lax.convert_element_type(x, DTYPES[node.kind]),
    "sum": lambda node, x: lax.reduce_sum(x, node.params),
    "largest": lambda node, x: lax.reduce_max(x, node.params),
    "smallest": lambda node, x: lax.reduce_min(x, node.params),
    "argmax": lambda node, x: lax.argmax(x, node.params[0], np.int32),
    "cumsum": lambda node, x: lax.cumsum(x, node.params[0]),
    "sort": lambda node, x: lax.sort(x, dimension=node.params[0]),
    "rev": lambda node, x: lax.rev(x, node.params),
    "top": lambda node, x: lax.top_k(x, node.params[0])[0],
    "spread": lambda node, x: lax.broadcast_in_dim(x, node.shape, node.params[0]),
    "turned": lambda node, x: lax.transpose(x, (1, 0)),
    "cut": lambda node, x: lax.slice_in_dim(x, node.params[1], node.params[2], axis=node.params[0]),
    "joined": lambda node, *xs: lax.concatenate(xs, node.params[0]),
    "window": lambda node, x, start: lax.dynamic_slice_in_dim(x, start, node.params[0], 0),
    "taken": _take,
    "dot": lambda node, x, y: lax.dot_general(x, y, (((1,), (0,)), ((), ()))),
    "dot of rows": lambda node, x, y: lax.dot_general(x, y, (((0,), (0,)), ((), ()))),
    "scan": _scan,
    "noise": _noise,
    "psum": lambda node, x: lax.psum(x, AXIS),
    "pmax": lambda node, x: lax.pmax(x, AXIS),
    "pmin": lambda node, x: lax.pmin(x, AXIS),
    "all_gather": lambda node, x: lax.all_gather(x, AXIS, tiled=True),
    "ppermute": lambda node, x: lax.ppermute(x, AXIS, node.params[0]),
    "psum_scatter": lambda node, x: lax.psum_scatter(x, AXIS, tiled=True),
    "all_to_all": lambda node, x: lax.all_to_all(x, AXIS, *node.params, tiled=True),
    "axis_index": lambda node: lax.axis_index(AXIS),
}


def built(root: Node) -> Callable[..., Any]:
    """The function of the inputs that a tree says; of a kernel, for `jax.shard_map` over the axis `AXIS`."""
    order = every(root)

    def function(*inputs: Any) -> Any:
        values: dict[int, Any] = {}
        for node in order:
            if node.op == "input":
                values[id(node)] = inputs[node.params[0]]
            else:
                values[id(node)] = _JAX[node.op](node, *(values[id(each)] for each in node.args))
        return values[id(root)]

    return function
