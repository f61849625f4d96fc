"""A small language of programs on arrays, with two meanings: a function in jax, and an evaluation by numpy.

A program is a tree of nodes; a kernel's has the shapes of one device, and collectives. `built` makes the function that
is proved. `evaluated` computes the same at many points in float64 or longer, and shares no code with the prover: it can
say which of two programs differ. For example the sum of the squares of the rows of two devices:

    x = named("input", (2, 3), "f", params=(0,))
    total = psum(reduced("sum", mul(x, x), 0))                      # one device's rows, then those of both
    function = built(total)                                          # of a local array of 2 rows, for jax.shard_map
    evaluated(total, [np.ones((5, 4, 3))], [True], 2).value          # [5 points, 2 devices, 3]: all 4.0
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
NEAR = 1e-9  # two numbers that differ by less: rounding, not the program, would decide a comparison
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
        carry = _round(body, keep, carry, row, lax.max)
        return carry, carry

    first = lax.full(node.shape[1:], np.float32(0))
    over = tuple(compat.varying_axes(x))
    first = compat.cast_varying(first, over) if over else first
    return lax.scan(step, first, x)[1]


def _round(body: str, keep: float, carry: Any, row: Any, larger: Callable[[Any, Any], Any]) -> Any:
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


# By numpy


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """What a program is at some points.

    Attributes:
        value: [points, devices, *shape].
        unclear: [points]: where rounding or overflow, and not the program, would say what it is.
        unordered: [points]: where a maximum was taken of what has a NaN: it is NaN, but not to all compilers.
    """

    value: np.ndarray
    unclear: np.ndarray
    unordered: np.ndarray


def evaluated(
    root: Node, points: Sequence[np.ndarray], split: Sequence[bool], devices: int, dtype: Any = np.float64
) -> Evaluated:
    """The values of a program at points, a row of each global input; `split` says which are split over the devices."""
    evaluation = Evaluation(devices, len(points[0]), dtype)
    inputs = [evaluation.dealt(x, each) for x, each in zip(points, split, strict=True)]
    values: dict[int, np.ndarray] = {}
    with np.errstate(all="ignore"):
        for node in every(root):
            if node.op == "input":
                values[id(node)] = inputs[node.params[0]]
            else:
                values[id(node)] = evaluation(node, [values[id(each)] for each in node.args])
    whole = (len(points[0]), devices, *root.shape)
    return Evaluated(np.broadcast_to(values[id(root)], whole), evaluation.unclear, evaluation.unordered)


def _finite(x: np.ndarray) -> np.ndarray:
    return np.isfinite(x) if x.dtype.kind == "f" else np.ones(x.shape, bool)


class Evaluation:
    """Operations on values of many points and all devices, [points, devices, *shape]; 1 for what all have alike.

    Attributes:
        unclear: [points], as in `Evaluated`.
        unordered: likewise.
    """

    def __init__(self, devices: int, points: int, dtype: Any):
        self.devices, self.dtype = devices, dtype
        self.unclear, self.unordered = np.zeros(points, bool), np.zeros(points, bool)

    def dealt(self, x: np.ndarray, split: bool) -> np.ndarray:
        """A global input on the devices."""
        x = x.astype(self.dtype)
        if not split:
            return x[:, None]
        return x.reshape(len(x), self.devices, x.shape[1] // self.devices, *x.shape[2:])

    def doubt(self, where: np.ndarray) -> None:
        """Marks the points at which any element is so."""
        self.unclear |= where.reshape(len(where), -1).any(1)

    def __call__(self, node: Node, xs: list[np.ndarray]) -> np.ndarray:
        name = node.op
        if name in _EXTREMES:
            for x in xs:
                self.unordered |= np.isnan(x).reshape(len(x), -1).any(1)
        if name in _UFUNCS:
            result = _UFUNCS[name](*xs)
            if name in ("add", "sub", "mul", "div", "exp") and node.kind == "f":
                self._overflown(name, xs, result)
            elif name in _COMPARISONS:
                self._near(*xs)
            return result
        if name in _SENT:
            xs = [self._everywhere(xs[0])]
        return getattr(self, f"_{name.replace(' ', '_')}")(node, *xs)

    def _overflown(self, name: str, xs: list[np.ndarray], result: np.ndarray) -> None:
        finite = _finite(xs[0]) if len(xs) == 1 else _finite(xs[0]) & _finite(xs[1])
        if name == "div":
            finite = finite & (xs[1] != 0)
        lost = finite & ~_finite(result)
        if name in ("mul", "div"):
            lost = lost | (finite & (result == 0) & (xs[0] != 0) & (xs[1] != 0))
        elif name == "exp":
            lost = lost | (finite & (result == 0))
        self.doubt(lost)

    def _near(self, x: np.ndarray, y: np.ndarray) -> None:
        if x.dtype.kind != "f":
            return
        close = np.abs(x - y) <= NEAR * (1 + np.abs(x) + np.abs(y))
        self.doubt(close & (x != y))

    def _near_along(self, x: np.ndarray, dim: int) -> None:
        """Doubts an order of elements of which two are nearly the same, or of NaNs."""
        ordered = np.sort(x, dim)
        n = x.shape[dim]
        self._near(np.take(ordered, range(1, n), dim), np.take(ordered, range(n - 1), dim))
        self.doubt(np.isnan(x))

    def _everywhere(self, x: np.ndarray) -> np.ndarray:
        """With a row for each device."""
        return np.broadcast_to(x, (len(x), self.devices, *x.shape[2:]))

    def _constant(self, node: Node) -> np.ndarray:
        value = node.params[0]
        if node.kind == "f":
            value = np.where(np.abs(value) >= INFINITE, np.sign(value) * np.inf, value).astype(self.dtype)
        return value[None, None]

    def _where(self, node: Node, mask: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.where(mask, x, y)

    def _floor(self, node: Node, x: np.ndarray) -> np.ndarray:
        self._near(x, np.round(x))
        return np.floor(x)

    def _cast(self, node: Node, x: np.ndarray) -> np.ndarray:
        if node.kind == "f":
            return x.astype(self.dtype)
        if x.dtype.kind == "f":
            self._near(x, np.round(x))
            self.doubt(~(np.abs(x) < 1e6))
            x = np.where(np.abs(x) < 1e6, x, 0)
        return np.trunc(x).astype(np.int64)

    def _sum(self, node: Node, x: np.ndarray) -> np.ndarray:
        result = x.sum(node.params[0] + 2)
        if node.kind == "f":
            self.doubt(~np.isfinite(result) & np.isfinite(x).all(node.params[0] + 2))
        return result

    def _largest(self, node: Node, x: np.ndarray) -> np.ndarray:
        return x.max(node.params[0] + 2)

    def _smallest(self, node: Node, x: np.ndarray) -> np.ndarray:
        return x.min(node.params[0] + 2)

    def _argmax(self, node: Node, x: np.ndarray) -> np.ndarray:
        self._near_along(x, node.params[0] + 2)
        return x.argmax(node.params[0] + 2)

    def _cumsum(self, node: Node, x: np.ndarray) -> np.ndarray:
        return x.cumsum(node.params[0] + 2)

    def _sort(self, node: Node, x: np.ndarray) -> np.ndarray:
        self.doubt(np.isnan(x))
        return np.sort(x, node.params[0] + 2)

    def _rev(self, node: Node, x: np.ndarray) -> np.ndarray:
        return np.flip(x, node.params[0] + 2)

    def _top(self, node: Node, x: np.ndarray) -> np.ndarray:
        self.doubt(np.isnan(x))
        return np.flip(np.sort(x, -1), -1)[..., : node.params[0]]

    def _spread(self, node: Node, x: np.ndarray) -> np.ndarray:
        own = [1] * len(node.shape)
        for dim, size in zip(node.params[0], x.shape[2:], strict=True):
            own[dim] = size
        return np.broadcast_to(x.reshape(*x.shape[:2], *own), (*x.shape[:2], *node.shape))

    def _turned(self, node: Node, x: np.ndarray) -> np.ndarray:
        return np.swapaxes(x, 2, 3)

    def _cut(self, node: Node, x: np.ndarray) -> np.ndarray:
        dim, start, stop = node.params
        return np.take(x, range(start, stop), dim + 2)

    def _joined(self, node: Node, *xs: np.ndarray) -> np.ndarray:
        front = np.broadcast_shapes(*(x.shape[:2] for x in xs))
        whole = [np.broadcast_to(x, (*front, *x.shape[2:])) for x in xs]
        return np.concatenate(whole, node.params[0] + 2)

    def _window(self, node: Node, x: np.ndarray, start: np.ndarray) -> np.ndarray:
        size = node.params[0]
        first = np.clip(start, 0, x.shape[2] - size)
        return self._rows(x, first[..., None] + np.arange(size))

    def _taken(self, node: Node, x: np.ndarray, at: np.ndarray) -> np.ndarray:
        n = x.shape[2]
        inside = (at >= 0) & (at < n)
        result = self._rows(x, np.clip(at, 0, n - 1))
        if node.params[0] == "nearest":
            return result
        outside = np.nan if node.params[0] == "nan" else 0
        inside = inside.reshape(*inside.shape, *[1] * (result.ndim - inside.ndim))
        return np.where(inside, result, outside)

    def _rows(self, x: np.ndarray, at: np.ndarray) -> np.ndarray:
        front = np.broadcast_shapes(x.shape[:2], at.shape[:2])
        x, at = np.broadcast_to(x, (*front, *x.shape[2:])), np.broadcast_to(at, (*front, *at.shape[2:]))
        flat = at.reshape(*front, -1, *[1] * (x.ndim - 3))
        rows = np.take_along_axis(x, np.broadcast_to(flat, (*flat.shape[:3], *x.shape[3:])), 2)
        return rows.reshape(*at.shape, *x.shape[3:])

    def _dot(self, node: Node, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.einsum("pdij,pdjk->pdik", *self._alike(x, y))

    def _dot_of_rows(self, node: Node, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.einsum("pdji,pdjk->pdik", *self._alike(x, y))

    def _alike(self, *xs: np.ndarray) -> list[np.ndarray]:
        front = np.broadcast_shapes(*(x.shape[:2] for x in xs))
        return [np.broadcast_to(x, (*front, *x.shape[2:])) for x in xs]

    def _scan(self, node: Node, x: np.ndarray) -> np.ndarray:
        body, keep = node.params
        carry, rows = np.zeros_like(x[:, :, 0]), []
        for number in range(x.shape[2]):
            carry = _round(body, keep, carry, x[:, :, number], np.maximum)
            rows.append(carry)
        return np.stack(rows, 2)

    def _noise(self, node: Node, number: np.ndarray) -> np.ndarray:
        parts = []
        for each in number.reshape(-1):
            parts.append(np.random.default_rng([node.params[0], int(each) % 2**32]).random(node.shape))
        return np.stack(parts).reshape(*number.shape, *node.shape).astype(self.dtype)

    # Collectives

    def _psum(self, node: Node, x: np.ndarray) -> np.ndarray:
        return x.sum(1, keepdims=True)

    def _pmax(self, node: Node, x: np.ndarray) -> np.ndarray:
        return x.max(1, keepdims=True)

    def _pmin(self, node: Node, x: np.ndarray) -> np.ndarray:
        return x.min(1, keepdims=True)

    def _all_gather(self, node: Node, x: np.ndarray) -> np.ndarray:
        return x.reshape(len(x), 1, -1, *x.shape[3:])

    def _ppermute(self, node: Node, x: np.ndarray) -> np.ndarray:
        result = np.zeros_like(x)
        for source, target in node.params[0]:
            result[:, target] = x[:, source]
        return result

    def _psum_scatter(self, node: Node, x: np.ndarray) -> np.ndarray:
        return self.dealt(x.sum(1), True)

    def _all_to_all(self, node: Node, x: np.ndarray) -> np.ndarray:
        split, to = node.params
        pieces = np.stack(np.split(x, self.devices, split + 2), 1)  # [points, receiver, sender, ...]
        return np.concatenate(np.moveaxis(pieces, 2, 0), to + 2)

    def _axis_index(self, node: Node) -> np.ndarray:
        return np.arange(self.devices)[None]


_COMPARISONS = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
_COMPARISONS |= {"eq": np.equal, "ne": np.not_equal}
_EXTREMES = {"max", "min", "largest", "smallest", "pmax", "pmin"}
_SENT = {"psum", "pmax", "pmin", "all_gather", "ppermute", "psum_scatter", "all_to_all"}
_UFUNCS: dict[str, Callable[..., Any]] = {
    **_COMPARISONS,
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.maximum, "min": np.minimum,
    "neg": np.negative, "exp": np.exp, "log": np.log, "abs": np.abs, "tanh": np.tanh,
    "and": np.logical_and, "or": np.logical_or, "not": np.logical_not,
}  # fmt: skip
