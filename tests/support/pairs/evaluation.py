"""The values of programs by numpy, at many points, in float64 or longer: what says which of two programs differ.

It shares no code with the proof, and says where rounding or overflow would decide.

    x = named("input", (2, 3), "f", params=(0,))
    total = psum(reduced("sum", mul(x, x), 0))
    evaluated(total, [np.ones((5, 4, 3))], [True], 2).value     # [5 points, 2 devices, 3]: all 4.0
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from support.pairs.language import INFINITE, Node, every, rounded

NEAR = 1e-9  # two numbers that differ by less: rounding, not the program, would decide a comparison


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """What a program is at some points.

    Attributes:
        value: [points, devices, *shape].
        unclear: [points]: where rounding or overflow, and not the program, would say what it is.
        unordered: [points]: where a maximum was taken of what has a NaN: it is NaN, but not to all compilers.
        summed: [points]: the largest number that was added to another; what is far smaller may be its rounding.
        undefined: [points]: where some value on the way is NaN, as zero divided by zero, or where a divisor or the
            argument of a logarithm is zero that is another number at other points.
    """

    value: np.ndarray
    unclear: np.ndarray
    unordered: np.ndarray
    summed: np.ndarray
    undefined: np.ndarray


def evaluated(
    root: Node,
    points: Sequence[np.ndarray],
    split: Sequence[bool],
    devices: int,
    dtype: Any = np.float64,
    *,
    infinite: bool = True,
) -> Evaluated:
    """The values of a program at points, a row of each global input; `split` says which are split over the devices.

    `infinite` says whether constants such as -1e30 stand for infinity, or are numbers.
    """
    evaluation = Evaluation(devices, len(points[0]), dtype, infinite)
    inputs = [evaluation.dealt(x, each) for x, each in zip(points, split, strict=True)]
    values: dict[int, np.ndarray] = {}
    with np.errstate(all="ignore"):
        for node in every(root):
            if node.op == "input":
                values[id(node)] = inputs[node.params[0]]
            else:
                value = evaluation(node, [values[id(each)] for each in node.args])
                if node.kind == "f":
                    value = value + 0.0  # -0.0 is 0.0: mask * z may be written for where(mask, z, 0)
                values[id(node)] = value
                evaluation.note_undefined(value)
    whole = (len(points[0]), devices, *root.shape)
    value = np.broadcast_to(values[id(root)], whole)
    return Evaluated(value, evaluation.unclear, evaluation.unordered, evaluation.summed, evaluation.undefined)


def _finite(x: np.ndarray) -> np.ndarray:
    return np.isfinite(x) if x.dtype.kind == "f" else np.ones(x.shape, bool)


class Evaluation:
    """Operations on values of many points and all devices, [points, devices, *shape]; 1 for what all have alike.

    Attributes:
        unclear: [points], as in `Evaluated`.
        unordered: likewise.
        summed: likewise.
        undefined: likewise.
    """

    def __init__(self, devices: int, points: int, dtype: Any, infinite: bool = True):
        self.devices, self.dtype, self.infinite = devices, dtype, infinite
        self.unclear, self.unordered = np.zeros(points, bool), np.zeros(points, bool)
        self.summed = np.zeros(points, dtype)
        self.undefined = np.zeros(points, bool)

    def dealt(self, x: np.ndarray, split: bool) -> np.ndarray:
        """A global input on the devices."""
        x = x.astype(self.dtype)
        if not split:
            return x[:, None]
        return x.reshape(len(x), self.devices, x.shape[1] // self.devices, *x.shape[2:])

    def doubt(self, where: np.ndarray) -> None:
        """Marks the points at which any element is so."""
        self.unclear |= where.reshape(len(where), -1).any(1)

    def note_undefined(self, x: np.ndarray) -> None:
        """Marks the points at which any element is NaN."""
        if x.dtype.kind == "f":
            self.undefined |= np.isnan(x).reshape(len(x), -1).any(1)

    def note_zeros(self, x: np.ndarray) -> None:
        """Marks the points at which an element is zero that is not so at all points."""
        is_zero = (x == 0) & (x != 0).any(0)
        self.undefined |= is_zero.reshape(len(x), -1).any(1)

    def __call__(self, node: Node, xs: list[np.ndarray]) -> np.ndarray:
        name = node.op
        if name in _EXTREMES:
            for x in xs:
                self.unordered |= np.isnan(x).reshape(len(x), -1).any(1)
        elif name in _SUMS and node.kind == "f":
            for x in xs:
                size = np.where(np.isfinite(x), np.abs(x), 0).reshape(len(x), -1)
                self.summed = np.maximum(self.summed, size.max(1, initial=0))
        if name in _UFUNCS:
            result = _UFUNCS[name](*xs)
            if name in ("div", "log") and node.kind == "f":
                self.note_zeros(xs[-1])
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
            # exp(1e-20) is 1, so that the logarithm of its logarithm would be infinite.
            lost = lost | (finite & (result == 0)) | (finite & (result == 1) & (xs[0] != 0))
        self.doubt(lost)

    def _near(self, x: np.ndarray, y: np.ndarray) -> None:
        if x.dtype.kind != "f":
            return
        close = np.abs(x - y) <= NEAR * (1 + np.abs(x) + np.abs(y))
        self.doubt(close & (x != y) & np.isfinite(x) & np.isfinite(y))

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
            if self.infinite:
                value = np.where(np.abs(value) >= INFINITE, np.sign(value) * np.inf, value)
            value = np.asarray(value).astype(self.dtype)
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
        return self._product("pdij,pdjk->pdik", x, y)

    def _dot_of_rows(self, node: Node, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return self._product("pdji,pdjk->pdik", x, y)

    def _product(self, dims: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        x, y = self._alike(x, y)
        self.summed = np.maximum(self.summed, np.abs(x).max((1, 2, 3), initial=0) * np.abs(y).max((1, 2, 3), initial=0))
        return np.einsum(dims, x, y)

    def _alike(self, *xs: np.ndarray) -> list[np.ndarray]:
        front = np.broadcast_shapes(*(x.shape[:2] for x in xs))
        return [np.broadcast_to(x, (*front, *x.shape[2:])) for x in xs]

    def _scan(self, node: Node, x: np.ndarray) -> np.ndarray:
        body, keep = node.params
        carry, rows = np.zeros_like(x[:, :, 0]), []
        for number in range(x.shape[2]):
            carry = rounded(body, keep, carry, x[:, :, number], np.maximum)
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
_SUMS = {"add", "sub", "sum", "cumsum", "dot", "dot of rows", "scan", "psum", "psum_scatter"}
_EXTREMES = {"max", "min", "largest", "smallest", "pmax", "pmin"}
_SENT = {"psum", "pmax", "pmin", "all_gather", "ppermute", "psum_scatter", "all_to_all"}
_UFUNCS: dict[str, Callable[..., Any]] = {
    **_COMPARISONS,
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.maximum, "min": np.minimum,
    "neg": np.negative, "exp": np.exp, "log": np.log, "abs": np.abs, "tanh": np.tanh,
    "and": np.logical_and, "or": np.logical_or, "not": np.logical_not,
}  # fmt: skip
