"""What may repair a wrong program: for an equation, other results in place of its own, and how a message says so.

A repair is tried by running the program once more with it. What is tried are the mistakes that programs with
collectives have: a sum too few or over another axis, another device's piece, a mask or an offset that is one off, a
scale by the size of an axis, another operator, another operand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit._arguments.checks import quoted
from shardkit._jax.jaxprs import mesh_axes, source_line
from shardkit._jax.primitives import registered
from shardkit.testing._compare import is_float
from shardkit.testing.exact.interpreter import Interpreter
from shardkit.testing.exact.numbers.arithmetic import multiply
from shardkit.testing.exact.numbers.assembly import where
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.rules.exchanges import Devices
from shardkit.testing.exact.rules.operands import Operand

# What each variable was last.
Values = Mapping[Any, Operand]
# From operands, results and variables to other results.
Change = Callable[..., Sequence[Operand]]


class Call(NamedTuple):
    """An equation where it is called, with the operands and results that it had first."""

    equation: Any
    around: str
    axes: Mapping[str, int]
    operands: Sequence[Operand]
    results: Sequence[Operand]

    @property
    def key(self) -> tuple[int, str]:
        """By which a run knows it again."""
        return id(self.equation), self.around

    @property
    def name(self) -> str:
        """That of the primitive, or of the function that is called."""
        return str(self.equation.params.get("name") or self.equation.primitive.name)

    @property
    def line(self) -> str:
        """Where it stands."""
        return source_line(self.equation, self.around)

    def __str__(self) -> str:
        return f"{self.name} at {self.line}"


class Repair(NamedTuple):
    """Other results for an equation.

    Attributes:
        cost: how unlikely it is that this was the mistake.
        words: what is done.
        change: computes the results from operands, results and variables.
        behind: whether it is done to the result, so that the mistake is behind the equation.
    """

    cost: float
    words: str
    change: Change
    behind: bool = False


# How unlikely a mistake is: what communicates is mistaken more often than what does not.
_COLLECTIVE, _INDEX, _SUM, _OPERATOR, _SIZE, _OPERAND, _DIM, _FACTOR, _RARE = (
    0.0,
    1.0,
    1.0,
    1.5,
    1.5,
    2.0,
    2.0,
    2.5,
    3.0,
)
_MOST_STARTS = 8
_FUNCTIONS = (lax.sqrt, lax.rsqrt, lax.exp, lax.log, lax.tanh, lax.square)
_OTHERS = {
    "add": ("sub",),
    "sub": ("add",),
    "mul": ("div",),
    "div": ("mul",),
    "max": ("min",),
    "min": ("max",),
    "lt": ("le", "gt", "ge"),
    "le": ("lt", "ge", "gt"),
    "gt": ("ge", "lt", "le"),
    "ge": ("gt", "le", "lt"),
    "eq": ("ne", "le", "ge"),
    "ne": ("eq",),
    "and": ("or",),
    "or": ("and",),
    "rem": ("div",),
    "reduce_sum": ("reduce_max",),
    "reduce_max": ("reduce_min", "reduce_sum"),
    "reduce_min": ("reduce_max",),
    "sqrt": ("rsqrt",),
    "rsqrt": ("sqrt",),
}
_PRIMITIVES = {name: getattr(lax, f"{name}_p") for name in {*_OTHERS, *itertools.chain(*_OTHERS.values())}}
_SWAPPED = ("sub", "div", "dot_general", "lt", "le", "gt", "ge")
_BINARY = ("add", "sub", "mul", "div", "max", "min", "and", "or")
_UNARY = ("neg", "sqrt", "exp", "log", "tanh", "logistic", "square", "integer_pow", "abs", "rev", "stop_gradient")
# Whose results a sum over devices may be missing for. What only passes elements on has that of what made them.
_SUMMED = {
    *("add", "sub", "mul", "div", "neg", "integer_pow", "square", "reduce_sum", "dot_general", "cumsum", "scatter-add"),
    *("select_n", "gather", "dynamic_slice", "psum", "psum_invariant", "shard_map"),
    *("conv_general_dilated", "reduce_window_sum"),
}
# Equations that only pass elements on.
PASSING = ("convert_element_type", "reshape", "squeeze", "transpose", "expand_dims")
_EXTREMES = {"reduce_max": "maximum", "max": "maximum", "reduce_min": "minimum", "min": "minimum"}


def repairs(field: Field, place: Call, others: Sequence[Any], sizes: Sequence[int]) -> Iterator[Repair]:
    """What may be tried for an equation that could read the variables `others`, in a program with dims of `sizes`."""
    if all(isinstance(x, Exact) or x.dtype.kind in "fiub" for x in (*place.operands, *place.results)):
        yield from _Tools(field, place, sizes).all(others)


def _is_whole(x: Operand) -> bool:
    return not isinstance(x, Exact) and x.dtype.kind in "iu"


def _is_mask(x: Operand) -> bool:
    return not isinstance(x, Exact) and x.dtype.kind == "b"


class _Tools:
    """Makes the repairs of a place."""

    def __init__(self, field: Field, place: Call, sizes: Sequence[int]):
        self.field, self.place, self.sizes = field, place, sizes
        self.name, self.axes, self.rank = place.name, place.axes, len(place.axes)
        self.params, self.operands = place.equation.params, place.operands
        self.run = Interpreter(field, place.axes)
        self.devices = Devices(field, place.axes)

    def all(self, others: Sequence[Any]) -> Iterator[Repair]:
        if len(self.place.results) != 1:
            return
        [result] = self.place.results
        yield from self.collectives()
        yield from self.masks(others)
        if self.name == "axis_index":
            yield from self.indices()
        elif _is_whole(result) and result.dtype.kind == "i":
            yield from self.integers()
        if not _is_mask(result):
            yield from self.sums()
            if self.place.equation.primitive.name not in PASSING:
                yield from self.scales()
        if self.name != "shard_map":
            yield from self.moves()
            yield from self.operators()
            yield from self.substitutes(others)
            if isinstance(result, Exact) and is_float(self.place.equation.outvars[0].aval):
                yield from self.functions()
                yield from self.terms(others)

    def changed(self, cost: float, words: str, change: Callable[..., Operand]) -> Repair:
        """A repair that changes the result."""
        return Repair(cost, words, lambda operands, results, values: [change(results[0])], behind=True)

    def instead(self, cost: float, words: str, change: Callable[..., Sequence[Operand]]) -> Repair:
        """A repair that computes another result from the operands."""
        return Repair(cost, words, lambda operands, results, values: change(operands))

    def again(self, operands: Sequence[Operand], primitive: Any = None, **params: Any) -> Sequence[Operand]:
        """The equation of other operands, or another one."""
        equation = self.place.equation.replace(params={**self.params, **params})
        if primitive is not None:
            equation = equation.replace(primitive=primitive)
        return self.run.step(equation, list(operands))

    def collectives(self) -> Iterator[Repair]:
        kind, bound = registered(self.place.equation.primitive.name).kind, mesh_axes(self.place.equation)
        if kind is None:
            return
        [x], [y] = self.operands, self.place.results
        if x.shape[self.rank :] == y.shape[self.rank :]:
            yield self.instead(_COLLECTIVE, f"without {self.name}", lambda xs: xs)
        if kind == "all_reduce":
            by = registered(self.place.equation.primitive.name).reduces or "sum"
            for names in _subsets(self.axes):
                if set(names) != set(bound):
                    words = f"{self.name} over {quoted(names)} in place of {quoted(bound)}"
                    yield self.instead(_COLLECTIVE, words, lambda xs, n=names: [self.reduced(xs[0], n, by)])
        if kind == "all_gather":
            for names in itertools.permutations(bound):
                if names != bound:
                    words = f"{self.name} over {quoted(names)} in place of {quoted(bound)}"
                    yield self.instead(_COLLECTIVE, words, lambda xs, n=names: [self.gathered(xs[0], n)])
        if kind == "ppermute":
            yield from self.permutations(bound)

    def permutations(self, bound: tuple[str, ...]) -> Iterator[Repair]:
        n = math.prod(self.axes[name] for name in bound)
        back = [(end, start) for start, end in self.params["perm"]]
        yield self.instead(_COLLECTIVE, "ppermute the other way round", lambda xs: [self.permuted(xs[0], back, bound)])
        for by in range(1, min(n, _MOST_STARTS)):
            for wrap in (True, False):
                pairs = [(i, (i + by) % n) for i in range(n if wrap else n - by)]
                words = f"ppermute from each device to that {by} further on{'' if wrap else ', without a wrap'}"
                yield self.instead(_COLLECTIVE, words, lambda xs, p=pairs: [self.permuted(xs[0], p, bound)])

    def reduced(self, x: Operand, names: Sequence[str], by: str = "sum") -> Operand:
        return self.devices.reduce(x, names, by)

    def gathered(self, x: Operand, names: Sequence[str]) -> Operand:
        return self.devices.gather(x, names, self.params["all_gather_dimension"], self.params["tiled"])

    def permuted(self, x: Operand, pairs: Any, names: Sequence[str]) -> Operand:
        return self.devices.permute(x, names, pairs)

    def sums(self) -> Iterator[Repair]:
        """Sums, means, extremes and shifts over axes along which the result differs."""
        [x] = self.place.results
        varying = [name for name, size in zip(self.axes, x.shape, strict=False) if size > 1]
        for names in _subsets(varying):
            over = f"of {self.name} over {quoted(names)}"
            share = Fraction(1, math.prod(self.axes[name] for name in names))
            if by := _EXTREMES.get(self.name):
                yield self.changed(_SUM, f"the {by} {over}", lambda x, n=names, by=by: self.reduced(x, n, by))
            elif self.name in _SUMMED:
                yield self.changed(_SUM, f"the sum {over}", lambda x, n=names: self.reduced(x, n))
                if not _is_whole(x):
                    mean = lambda x, n=names, s=share: self.scaled(self.reduced(x, n), s)  # noqa: E731
                    yield self.changed(_SUM, f"the mean {over}", mean)
        for name in varying if self.name in _SUMMED else ():
            devices = self.axes[name]
            for step in sorted({1, devices - 1}):
                pairs = [(i, (i + step) % devices) for i in range(devices)]
                words = f"{self.name} of the device {devices - step} further on along {name!r}"
                yield self.changed(_RARE, words, lambda x, p=pairs, m=name: self.permuted(x, p, [m]))

    def scales(self) -> Iterator[Repair]:
        """Factors: sizes of axes and dims, the sign."""
        sizes: dict[int, str] = {n: f"the size of {name!r}" for name, n in self.axes.items() if n > 1}
        sizes.setdefault(math.prod(self.axes.values()), "the number of devices")
        whole = {n * size for n in self.axes.values() for size in self.sizes}
        words = sizes | {n: "the size of a dim" for n in sorted({*self.sizes, *whole}) if n not in sizes}
        for n, size in words.items():
            cost = _SIZE if n in sizes else _DIM
            if n > 1:
                yield self.changed(cost, f"{self.name} times {n}, {size}", lambda x, n=n: self.scaled(x, Fraction(n)))
            if n > 1 and not _is_whole(self.place.results[0]):
                share = Fraction(1, n)
                yield self.changed(cost, f"{self.name} divided by {n}, {size}", lambda x, s=share: self.scaled(x, s))
        yield self.changed(_RARE, f"minus {self.name}", lambda x: self.scaled(x, Fraction(-1)))

    def scaled(self, x: Operand, ratio: Fraction) -> Operand:
        if not isinstance(x, Exact):
            return np.asarray(x * x.dtype.type(float(ratio)), x.dtype)
        return multiply(self.field, x, self.field.lift(np.full((1,) * len(x.shape), float(ratio))))

    # Masks

    def masks(self, others: Sequence[Any]) -> Iterator[Repair]:
        """Zero where a mask is false: of what is summed over devices, or of a result."""
        [result] = self.place.results
        sends = registered(self.place.equation.primitive.name).kind in ("all_reduce", "reduce_scatter")
        operand = self.operands[0] if self.operands else result
        if not isinstance(operand if sends else result, Exact):
            return
        for v in others:
            shape = getattr(v.aval, "shape", None)
            if getattr(v.aval, "dtype", None) != np.dtype("bool") or shape is None:
                continue
            words = f"{self.name} of what is zero where a mask is false"
            if sends and _fits(shape, operand.shape[self.rank :]):
                masked = lambda xs, ys, values, v=v: self.again([self.masked(xs[0], values[v])])  # noqa: E731
                yield Repair(_SUM, words, masked)
            elif not sends and _fits(shape, result.shape[self.rank :]):
                masked = lambda xs, ys, values, v=v: [self.masked(ys[0], values[v])]  # noqa: E731
                yield Repair(_FACTOR, words, masked, behind=True)

    def masked(self, x: Exact, mask: Operand) -> Operand:
        """x, zero where a mask of its first dims is false."""
        own = x.shape[self.rank :]
        mask = mask.reshape(mask.shape + (1,) * (len(own) - (mask.ndim - self.rank)))
        return where(mask, x, self.field.lift(np.zeros((1,) * len(x.shape), np.float32)))

    # Integers

    def indices(self) -> Iterator[Repair]:
        """Other indices of a device."""
        bound = mesh_axes(self.place.equation)
        for name, n in self.axes.items():
            if (name,) != bound:
                yield self.changed(_INDEX, f"the index along {name!r}", lambda x, m=name: self.devices.number((m,)))
                continue
            for by in sorted({1, n - 1}):
                words = f"the index along {name!r} of the device {by} further on"
                yield self.changed(_OPERAND, words, lambda x, n=n, by=by: (x + by) % n)
            words = f"the index along {name!r} from the other end"
            yield self.changed(_OPERAND, words, lambda x, n=n: n - 1 - x)

    def integers(self) -> Iterator[Repair]:
        """Offsets: by one, by the index of a device times a size."""
        for by in (1, -1):
            words = f"{self.name} {'plus' if by > 0 else 'minus'} 1"
            yield self.changed(_INDEX, words, lambda x, by=by: x + x.dtype.type(by))
        like, sizes = self.place.results[0], sorted({1, *self.sizes})
        for name, size, sign in itertools.product(self.axes, sizes, (1, -1)):
            words = f"{self.name} {'plus' if sign > 0 else 'minus'} the index along {name!r}"
            words += f" times {size}" if size > 1 else ""
            at, less = list(self.axes).index(name), self.place.results[0] + sign * size * self.index(name, like)
            if like.shape[at] > 1 and (less == less.take([0], at)).all():
                words = f"{self.name} that is the same along {name!r}"
            yield self.changed(_INDEX, words, lambda x, m=name, by=size * sign: x + self.index(m, x) * x.dtype.type(by))

    def index(self, name: str, like: np.ndarray) -> np.ndarray:
        """The index of a device, as an array that broadcasts."""
        index = self.devices.number((name,)).astype(like.dtype)
        return index.reshape(index.shape + (1,) * (like.ndim - index.ndim))

    # Where elements go

    def moves(self) -> Iterator[Repair]:
        name, params, operands = self.name, self.params, self.operands
        if name == "slice" and not any(step > 1 for step in params["strides"] or ()):
            for dim in range(len(params["start_indices"])):
                yield from self.starts(dim)
        if name == "concatenate" and 1 < len(operands) < 4:
            for order in itertools.permutations(range(len(operands))):
                if order != tuple(range(len(operands))):
                    words = "concatenate in another order"
                    yield self.instead(_OPERAND, words, lambda xs, o=order: self.again([xs[i] for i in o]))
        if name in ("cumsum", "cumprod"):
            reverse = not params["reverse"]
            yield self.instead(_OPERATOR, f"{name} in the other direction", lambda xs: self.again(xs, reverse=reverse))
        if name == "transpose" and operands[0].shape == self.place.results[0].shape:
            yield self.instead(_OPERATOR, f"without {name}", lambda xs: xs)
        if name == "dynamic_slice":
            for names in _subsets(axis for axis, n in zip(self.axes, operands[0].shape, strict=False) if n > 1):
                words = f"dynamic_slice of the sum over {quoted(names)}"
                yield self.instead(0.5, words, lambda xs, n=names: self.again([self.reduced(xs[0], n), *xs[1:]]))
        if name in ("gather", "scatter", "dynamic_slice", "dynamic_update_slice"):
            yield from self.positions()

    def starts(self, dim: int) -> Iterator[Repair]:
        """Other slices of the same size: at another place of a dim, or at the device's."""
        begins, ends = self.params["start_indices"], self.params["limit_indices"]
        size, width = self.operands[0].shape[self.rank + dim], ends[dim] - begins[dim]

        def at(x: Operand, start: int) -> Operand:
            new = _with(begins, dim, start), _with(ends, dim, start + width)
            return self.again([x], start_indices=new[0], limit_indices=new[1])[0]

        for start in range(min(size - width, _MOST_STARTS) + 1):
            if start != begins[dim]:
                words = f"a slice from {start} of dim {dim}"
                yield self.instead(_INDEX, words, lambda xs, start=start: [at(xs[0], start)])
        for name, n in self.axes.items():
            if n > 1 and n * width <= size < size + width:
                words = f"a slice from the index along {name!r}{f' times {width}' if width > 1 else ''} of dim {dim}"
                yield self.instead(
                    _INDEX, words, lambda xs, m=name, n=n: [self.own(m, [at(xs[0], i * width) for i in range(n)])]
                )

    def own(self, name: str, pieces: list[Operand]) -> Operand:
        """On each device along an axis its own one of the pieces."""
        result = pieces[0]
        for i, piece in enumerate(pieces[1:], 1):
            result = self.devices.choose(self.devices.number((name,)) == i, piece, result)
        return result

    def positions(self) -> Iterator[Repair]:
        """Of what reads or writes at integers: one place further on or back, around the end."""
        for at, x in enumerate(self.operands):
            if not _is_whole(x) or self.operands[0] is x:
                continue
            most = max(self.operands[0].shape[self.rank :], default=1)
            for by in (1, -1):
                words = f"{self.name} one place {'further on' if by > 0 else 'back'}"
                yield self.instead(
                    _INDEX, words,
                    lambda xs, at=at, by=by, n=most: self.again(_with(xs, at, (xs[at] + xs[at].dtype.type(by)) % n)),
                )  # fmt: skip

    # Operators and operands

    def operators(self) -> Iterator[Repair]:
        name, operands, [result] = self.name, self.operands, self.place.results
        for other in _OTHERS.get(name, ()):
            primitive = _PRIMITIVES[other]
            yield self.instead(_OPERATOR, f"{other} in place of {name}", lambda xs, p=primitive: self.again(xs, p))
        if name == "remainder":
            words = "a division in place of its remainder"
            yield self.instead(_OPERATOR, words, lambda xs: [np.floor_divide(*xs).astype(result.dtype)])
        if name == "floor_divide":
            words = "the remainder in place of the division"
            yield self.instead(_OPERATOR, words, lambda xs: [np.remainder(*xs).astype(result.dtype)])
        if name in _SWAPPED:
            yield self.instead(_OPERATOR, f"the operands of {name} exchanged", lambda xs: self.again(xs[::-1]))
        if name in _BINARY:
            for i, x in enumerate(operands):
                if x.shape[self.rank :] == result.shape[self.rank :]:
                    words = f"without the {('second', 'first')[i]} operand of {name}"
                    yield self.instead(_OPERATOR, words, lambda xs, i=i: [xs[i]])
        if name in _UNARY:
            yield self.instead(_OPERATOR, f"without {name}", lambda xs: xs)
        if _is_mask(result):
            for at, by in itertools.product(range(len(operands)), (1, -1)) if all(map(_is_whole, operands)) else ():
                words = f"{name} of an operand {'plus' if by > 0 else 'minus'} 1"
                more = lambda xs, at=at, by=by: self.again(_with(xs, at, xs[at] + xs[at].dtype.type(by)))  # noqa: E731
                yield self.instead(_INDEX, words, more)
            yield self.changed(_OPERATOR, f"the opposite of {name}", np.logical_not)
            yield self.changed(_OPERATOR, f"a mask that is always true in place of {name}", np.ones_like)
            yield self.changed(_OPERATOR, f"a mask that is always false in place of {name}", np.zeros_like)
        if name == "select_n" and len(operands) == 3:
            for number, case in ((1, "false"), (2, "true")):
                words = f"select_n as where the mask is {case}"
                yield self.instead(_OPERATOR, words, lambda xs, n=number: [xs[n]])
        if name == "integer_pow":
            for power in sorted({1, 2, 3} - {self.params["y"]}):
                yield self.instead(_OPERATOR, f"the power {power}", lambda xs, y=power: self.again(xs, y=y))

    def functions(self) -> Iterator[Repair]:
        """A function of the result."""
        aval = self.place.equation.outvars[0].aval
        if not jnp.issubdtype(aval.dtype, jnp.floating):
            return
        for function in _FUNCTIONS:
            equation = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(aval.shape, aval.dtype)).eqns[0]
            words = f"the {equation.primitive.name} of {self.name}"
            yield self.changed(_FACTOR, words, lambda x, e=equation: self.run.step(e, [x])[0])

    def terms(self, others: Sequence[Any]) -> Iterator[Repair]:
        """Another variable added to the result, or as its factor."""
        aval = self.place.equation.outvars[0].aval
        alike = [v for v in others if _alike(v.aval, aval)]
        for v, function in itertools.product(_some(alike), (lax.add, lax.sub, lax.mul, lax.div)):
            equation = jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(aval.shape, aval.dtype)] * 2).eqns[0]
            words = f"{equation.primitive.name} of {self.name} and another value"
            yield Repair(
                _FACTOR, words, lambda xs, ys, values, e=equation, v=v: self.run.step(e, [ys[0], values[v]]), True
            )  # fmt: skip

    def substitutes(self, others: Sequence[Any]) -> Iterator[Repair]:
        """Other variables in place of an operand, or times it."""
        for at, operand in enumerate(self.place.equation.invars):
            alike = [v for v in others if v is not operand and _alike(v.aval, operand.aval)]
            for v in _some(alike):
                words = f"another operand of {self.name}"
                yield Repair(_OPERAND, words, lambda xs, ys, values, at=at, v=v: self.again(_with(xs, at, values[v])))
            if self.name not in ("add", "sub", "mul", "dot_general") or not isinstance(self.operands[at], Exact):
                continue
            for v in [*_some(alike), *([] if hasattr(operand, "val") else [operand])]:
                words = f"another factor of {self.name}"
                yield Repair(_FACTOR, words, lambda xs, ys, values, at=at, v=v: self.times(xs, at, values[v]))

    def times(self, xs: list[Operand], at: int, other: Operand) -> Sequence[Operand]:
        """The equation with an operand times another value."""
        factors = (y if isinstance(y, Exact) else self.field.lift(y) for y in (xs[at], other))
        return self.again(_with(xs, at, multiply(self.field, *factors)))


def _fits(shape: tuple[int, ...], of: tuple[int, ...]) -> bool:
    """Whether a mask of a shape says something of the first dims of another."""
    return bool(shape) and shape == of[: len(shape)]


def _alike(a: Any, b: Any) -> bool:
    return getattr(a, "shape", None) == getattr(b, "shape", ()) and getattr(a, "dtype", None) == getattr(b, "dtype", 0)


def _with(values: Sequence[Any], at: int, value: Any) -> Any:
    changed = (*values[:at], value, *values[at + 1 :])
    return list(changed) if isinstance(values, list) else changed


def _some(variables: list[Any]) -> list[Any]:
    """The first and the last ones: inputs, and what was computed just before."""
    return variables if len(variables) < 7 else [*variables[:2], *variables[-4:]]


def _subsets(names: Any) -> list[tuple[str, ...]]:
    """Of axes: each alone, and several together."""
    names = list(names)
    return [part for n in range(1, len(names) + 1) for part in itertools.combinations(names, n)]
