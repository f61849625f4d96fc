"""What each primitive means in the field: a function of its operands, without a mesh.

The dims of a mesh come first in every operand (`rank` of them, of size 1 where all devices have the same), those of the
array behind. What only moves elements needs no rule of its own: it is applied to the places of the elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from shardkit._jax.jaxprs import source_line
from shardkit.testing.exact import linear_algebra, windows
from shardkit.testing.exact.field import Field, UnsupportedError, mixed
from shardkit.testing.exact.operands import Known, Operand, deciding, elements_at, joined, stacked
from shardkit.testing.exact.values import INPUT, NOT_A_NUMBER, OUTSIDE, TRULY, Exact, widened

_NEAR = 1e-6  # how far from an integer a real value is looked at more closely


def _reshape(part: np.ndarray, lead: int, equation: Any) -> np.ndarray:
    order = equation.params.get("dimensions") if equation.primitive.name == "reshape" else None
    if order is not None:
        part = part.transpose(*range(lead), *(lead + dim for dim in order))
    return part.reshape((*part.shape[:lead], *equation.outvars[0].aval.shape))


def _transpose(part: np.ndarray, lead: int, equation: Any) -> np.ndarray:
    return part.transpose(*range(lead), *(lead + dim for dim in equation.params["permutation"]))


def _broadcast(part: np.ndarray, lead: int, equation: Any) -> np.ndarray:
    shape, dims = equation.outvars[0].aval.shape, equation.params["broadcast_dimensions"]
    own = [1] * len(shape)
    for dim, size in zip(dims, part.shape[lead:], strict=True):
        own[dim] = size
    return np.broadcast_to(part.reshape((*part.shape[:lead], *own)), (*part.shape[:lead], *shape))


def _slice(part: np.ndarray, lead: int, equation: Any) -> np.ndarray:
    params = equation.params
    strides = params["strides"] or (1,) * (part.ndim - lead)
    cut = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return part[(slice(None),) * lead + tuple(slice(*each) for each in cut)]


def _reverse(part: np.ndarray, lead: int, equation: Any) -> np.ndarray:
    return np.flip(part, tuple(lead + dim for dim in equation.params["dimensions"]))


# Primitives of one operand that only move elements, behind `lead` other dims.
_ONE: dict[str, Callable[[np.ndarray, int, Any], np.ndarray]] = {
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "rev": _reverse,
}


def is_key(x: Any) -> bool:
    """Whether an array of jax, or the type of a value, is of keys."""
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.extended))


def held(x: Any) -> Known:
    """A constant or an input as a known array."""
    if not hasattr(x, "dtype") or not is_key(x):
        x = np.asarray(x)
        return widened(np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype)))
    return _worded(np.asarray(jax.random.key_data(x)))


def _worded(data: np.ndarray) -> np.ndarray:
    """Keys from their data: a word each, the two halves of one side by side, as `random_unwrap` gives them back."""
    word = np.zeros(data.shape[:-1], np.uint64)
    for number, part in enumerate(np.moveaxis(data, -1, 0)):
        whole = number % 2 == 0
        word = (mixed(word) if whole and number else word) ^ (part.astype(np.uint64) << np.uint64(32 if whole else 0))
    return word


# Random numbers are hashes of a key and a place. jax's own are so too, by another hash that takes longer to compile
# than all the rest; a program that is right is right for any.
def _random(equation: Any, operands: Sequence[np.ndarray], draw: int) -> np.ndarray | None:
    name, params = equation.primitive.name, equation.params
    x = operands[0]
    if name == "random_seed":
        seed = np.asarray(x).astype(np.int64).view(np.uint64)  # its halves are the data of the key
        return seed if np.asarray(x).dtype.itemsize > 4 else seed & np.uint64(0xFFFFFFFF)
    if name == "random_wrap":
        return _worded(x)
    if name == "random_unwrap":
        return np.stack([x >> np.uint64(32), x & np.uint64(0xFFFFFFFF)], -1).astype(np.uint32)
    if name == "random_clone":
        return x
    if name == "random_fold_in":
        return mixed(mixed(x), operands[1].astype(np.uint64))
    if name in ("random_split", "random_bits"):
        shape = params["shape"]
        count = np.arange(1, math.prod(shape) + 1, dtype=np.uint64) << np.uint64(32)
        words = mixed(x.reshape(x.shape + (1,) * len(shape)), count.reshape(shape))
        if name == "random_split":
            return words
        # Others in each draw: a comparison of random numbers goes both ways too.
        words = mixed(words, np.uint64(draw)) if draw else words
        return words.astype(f"uint{params['bit_width']}")
    return None


# Elementwise functions of known arrays that numpy computes with jax's bits, and faster.
_NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "shift_right_logical": np.right_shift,
    "square": np.square,
    "sqrt": np.sqrt,
    "rem": np.fmod,
}
_NUMPY_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "reduce_sum": np.add.reduce,
    "reduce_max": np.maximum.reduce,
    "reduce_min": np.minimum.reduce,
    "reduce_and": np.logical_and.reduce,
    "reduce_or": np.logical_or.reduce,
}


def known(equation: Any, operands: Sequence[Known], rank: int, draw: int = 0) -> list[Known]:
    """The results of an equation whose operands are all known, for every device, in a draw of that seed."""
    name, params = equation.primitive.name, equation.params
    out: Any = equation.outvars[0].aval if equation.outvars else None
    if name in _NUMPY:
        return [np.asarray(_NUMPY[name](*_aligned(operands, rank)), _long(out.dtype))]
    if name == "div" and jnp.issubdtype(out.dtype, jnp.floating):
        return [np.asarray(np.divide(*_aligned(operands, rank)), _long(out.dtype))]
    if name in _NUMPY_REDUCTIONS and not is_key(out):
        over = tuple(rank + dim for dim in params["axes"])
        return [np.asarray(_NUMPY_REDUCTIONS[name](operands[0], axis=over), _long(out.dtype))]
    if name == "cumsum":
        return [_cumulated(operands[0], rank + params["axis"], params["reverse"], _long(out.dtype))]
    if name in _ONE and len(operands) == 1:
        return [_ONE[name](operands[0], rank, equation)]
    if name == "iota" and not operands:
        shape = [size if dim == params["dimension"] else 1 for dim, size in enumerate(out.shape)]
        return [
            np.broadcast_to(np.arange(shape[params["dimension"]], dtype=_long(out.dtype)).reshape(shape), out.shape)[
                (None,) * rank
            ]
        ]
    if name == "convert_element_type" and operands[0].dtype != np.float64 and not is_key(out):
        return [operands[0].astype(_long(out.dtype))]
    if name == "bitcast_convert_type" and operands[0].dtype.itemsize == np.dtype(out.dtype).itemsize:
        return [np.ascontiguousarray(operands[0]).view(out.dtype)]
    if name == "select_n" and len(operands) == 3 and operands[0].dtype == bool:
        which, *cases = _aligned(operands, rank)
        return [np.where(which, cases[1], cases[0])]
    if name.startswith("random_") and (words := _random(equation, operands, draw)) is not None:
        return [words]
    if name in ("concatenate", "stack"):
        return [
            joined(list(operands), rank + params["dimension" if name == "concatenate" else "axis"], name == "stack")
        ]
    if name in _MOVES:
        data = _MOVES[name](len(operands))
        lead = np.broadcast_shapes(*(operands[i].shape[:rank] for i in data))
        flat = [np.broadcast_to(operands[i], lead + operands[i].shape[rank:]).reshape(*lead, -1) for i in data]
        source = np.concatenate([*flat, np.full((*lead, 1), _outside(equation), flat[0].dtype)], -1)[None]
        return [elements_at(source, at, rank)[0] for at in _places(equation, operands, data, rank)]
    return bound(equation, operands, rank)


def _cumulated(x: np.ndarray, dim: int, backwards: bool, dtype: Any) -> np.ndarray:
    """Sums from the first element on, or from the last one back."""
    if not backwards:
        return np.asarray(np.cumsum(x, dim, dtype))
    return np.flip(np.cumsum(np.flip(x, dim), dim, dtype), dim)


def bound(
    equation: Any, operands: Sequence[Known], rank: int, changed: dict[str, Any] | None = None, as_typed: bool = True
) -> list[Known]:
    """The primitive's own results, by jax, without a mesh, for the operands of every device."""
    if as_typed and any(is_key(v.aval) for v in (*equation.invars, *equation.outvars)):
        raise UnsupportedError(equation.primitive.name)
    params = {key: None if isinstance(x, NamedSharding) else x for key, x in equation.params.items()} | (changed or {})
    primitive = equation.primitive

    def run(*xs: Any) -> list[Any]:
        dtypes = [_long(v.aval.dtype) if as_typed else x.dtype for v, x in zip(equation.invars, xs, strict=True)]
        typed = [jnp.asarray(x, dtype) for x, dtype in zip(xs, dtypes, strict=True)]
        results = primitive.bind(*typed, **primitive.get_bind_params(params))
        return list(results) if primitive.multiple_results else [results]

    lead = np.broadcast_shapes(*(x.shape[:rank] for x in operands)) if operands else (1,) * rank
    if math.prod(lead) == 1:
        results = run(*(x.reshape(x.shape[rank:]) for x in operands))
        return [widened(np.asarray(y)).reshape((1,) * rank + y.shape) for y in results]
    split = [math.prod(x.shape[:rank]) > 1 for x in operands]
    flat = [
        np.broadcast_to(x, lead + x.shape[rank:]).reshape(-1, *x.shape[rank:]) if each else x.reshape(x.shape[rank:])
        for x, each in zip(operands, split, strict=True)
    ]
    results = jax.vmap(run, in_axes=tuple(0 if each else None for each in split))(*flat)
    return [widened(np.asarray(y)).reshape(lead + y.shape[1:]) for y in results]


def _outside(equation: Any) -> Any:  # what a gather reads out of bounds
    given, out = equation.params.get("fill_value"), equation.outvars[0].aval
    if given is not None or is_key(out):
        return given or 0
    if not jnp.issubdtype(out.dtype, jnp.integer):
        return np.nan  # True as a boolean
    return jnp.iinfo(out.dtype).min or jnp.iinfo(out.dtype).max


def _places(equation: Any, operands: Sequence[Any], data: Sequence[int], rank: int) -> list[np.ndarray]:
    """Where a primitive that moves elements takes each from: its place in all operands that are moved, in a row."""
    start: int = 0
    places = list(operands)
    for number in data:
        own = operands[number].shape[rank:]
        places[number] = (start + np.arange(math.prod(own), dtype=np.int32)).reshape((1,) * rank + own)
        start += math.prod(own)
    if equation.primitive.name == "split":
        dim = rank + equation.params["axis"]
        return list(np.split(places[0], np.cumsum(equation.params["sizes"])[:-1], dim))
    if equation.primitive.name == "pad":
        return [_padded_places(places[0], places[1], equation.params["padding_config"], rank)]
    if equation.primitive.name in ("dynamic_slice", "dynamic_update_slice"):
        return [_windows(equation, places, len(data), rank)]
    changed = {"fill_value": start} if equation.primitive.name == "gather" else {}
    return bound(equation, places, rank, changed, as_typed=False)


def _padded_places(x: np.ndarray, filling: np.ndarray, config: Any, rank: int) -> np.ndarray:
    """The places of a pad: low, high and between the elements of each dim; less than none cuts elements off."""
    sizes = x.shape[rank:]
    full = [low + high + max(n + (n - 1) * between, 0) for n, (low, high, between) in zip(sizes, config, strict=True)]
    result = np.full((*x.shape[:rank], *full), filling.reshape(-1)[0])
    into, taken = [slice(None)] * rank, [slice(None)] * rank
    for n, size, (low, _, between) in zip(sizes, full, config, strict=True):
        step = between + 1
        first = -(low // step) if low < 0 else 0  # of the elements that are kept
        last = min(n, (size - 1 - low) // step + 1)
        start = low + first * step
        taken.append(slice(first, max(last, first)))
        into.append(slice(start, start + max(last - first, 0) * step, step))
    result[tuple(into)] = x[tuple(taken)]
    return result


def _windows(equation: Any, places: Sequence[np.ndarray], data: int, rank: int) -> np.ndarray:
    """The places of a dynamic_slice or dynamic_update_slice."""
    whole = places[0].reshape(places[0].shape[rank:])
    sizes = equation.params["slice_sizes"] if data == 1 else places[1].shape[rank:]
    lead = np.broadcast_shapes((1,) * rank, *(x.shape for x in places[data:]))
    starts = [np.broadcast_to(x, lead) for x in places[data:]]
    rows = []
    for device in np.ndindex(*lead):
        at = [min(max(int(first[device]), 0), whole.shape[dim] - sizes[dim]) for dim, first in enumerate(starts)]
        window = tuple(slice(first, first + size) for first, size in zip(at, sizes, strict=True))
        row = whole[window]
        if data == 2:
            row = whole.copy()
            row[window] = places[1].reshape(sizes)
        rows.append(row)
    return np.stack(rows).reshape(*lead, *rows[0].shape)


def _is_short(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).bits < 32


def _long(dtype: Any) -> Any:
    """Known floats have at least 32 bits."""
    return jnp.float32 if _is_short(dtype) else dtype


def _aligned(operands: Sequence[Any], rank: int) -> list[Any]:
    """Scalars with as many dims of size 1 as the others have dims of their own."""
    most = max(x.ndim for x in operands)
    return [
        x if x.ndim == most else x.reshape(x.shape[:rank] + (1,) * (most - rank) + x.shape[rank:]) for x in operands
    ]


def _is_outside(x: Operand) -> bool:
    return isinstance(x, Exact) and bool((x.poison == OUTSIDE).any())


def _is_complex(variable: Any) -> bool:
    return bool(jnp.issubdtype(variable.aval.dtype, jnp.complexfloating))


def _refused(equation: Any) -> str:
    """What has no meaning, and for what reason."""
    name = equation.primitive.name
    if name in _WITHOUT_MEANING:
        return f"{name}, {_WITHOUT_MEANING[name]},"
    if any(_is_complex(v) for v in (*equation.invars, *equation.outvars)):
        return f"{name} of complex numbers, which two real arrays in their place would have,"
    return name


def _round_away(x: np.ndarray) -> np.ndarray:
    """Rounded, halves away from zero."""
    return np.trunc(x + np.copysign(0.5, x))


class Rules:
    """The primitives on operands of which at least one is in the field.

    Attributes:
        field: the arithmetic.
        rank: the number of mesh dims in front.
        around: the line of the call whose equations these are, for those that know none.
    """

    def __init__(self, field: Field, rank: int, around: str = ""):
        self.field, self.rank, self.around = field, rank, around

    def __call__(self, equation: Any, operands: Sequence[Operand]) -> list[Operand]:
        """The results of an equation."""
        name = equation.primitive.name
        if name in _ONE and len(operands) == 1:
            return [operands[0].moved(lambda part: _ONE[name](part, 1 + self.rank, equation))]
        if name == "unstack":
            dim = self.rank + equation.params["axis"]
            [x] = operands
            return [x.row(dim, i) for i in range(x.shape[dim])]
        if name in ("concatenate", "stack"):
            dim = self.rank + equation.params["dimension" if name == "concatenate" else "axis"]
            return [stacked(self.field, list(operands), dim, new=name == "stack")]
        if name in _MOVES and not (name == "select_n" and len(operands) == 3):
            return self.moved(equation, operands)
        rule = _RULES.get(name)
        if rule is None or any(_is_complex(v) for v in (*equation.invars, *equation.outvars)):
            raise UnsupportedError(_refused(equation))
        results = rule(self, equation, *operands)
        results = results if isinstance(results, list) else [results]
        if not self.field.outside and any(_is_outside(x) for x in results):
            self.field.outside = self.line(equation)
        return results

    def exact(self, *operands: Operand) -> list[Exact]:
        """Operands in the field, with dims that broadcast."""
        given = [x if isinstance(x, Exact) else self.field.lifted(x) for x in operands]
        most = max(len(x.shape) for x in given)
        return [x if len(x.shape) == most else x.moved(lambda part: self._padded(part, most)) for x in given]

    def _padded(self, part: np.ndarray, dims: int) -> np.ndarray:
        lead = 1 + self.rank
        return part.reshape(part.shape[:lead] + (1,) * (1 + dims - part.ndim) + part.shape[lead:])

    def dims(self, equation: Any) -> list[int]:
        """The dims of a reduction, behind those of the mesh."""
        return [self.rank + dim for dim in equation.params["axes"]]

    def moved(self, equation: Any, operands: Sequence[Operand]) -> list[Operand]:
        """A primitive that only moves elements, by what it does to the numbers of their places."""
        name = equation.primitive.name
        data = _MOVES[name](len(operands))
        for number, x in enumerate(operands):
            if number not in data:
                deciding(x, name)
        sources = [self.exact(operands[number])[0] for number in data]
        indices = _places(equation, operands, data, self.rank)
        sources.append(self.field.lifted(np.full((1,) * self.rank, _outside(equation))))
        lead = np.broadcast_shapes(*(x.shape[: self.rank] for x in sources))
        degree = sources[0].degree.plus(*(x.degree for x in sources))

        def flat(parts: Sequence[np.ndarray]) -> np.ndarray:
            rows = [np.broadcast_to(p, (len(p), *lead, *p.shape[1 + self.rank :])) for p in parts]
            return np.concatenate([row.reshape(len(row), *lead, -1) for row in rows], -1)

        numbers, known = flat([x.number for x in sources]), flat([x.facts for x in sources])
        reals, factors = flat([x.real for x in sources]), None
        if any(x.factor is not None for x in sources):
            factors = flat([np.ones_like(x.number) if x.factor is None else x.factor for x in sources])
        results: list[Operand] = []
        for at in indices:
            factor = None if factors is None else elements_at(factors, at, self.rank)
            here = partial(elements_at, at=at, rank=self.rank)
            results.append(Exact(here(numbers), here(known), here(reals), factor, degree))
        return results

    def selected(self, equation: Any, which: Operand, no: Operand, yes: Operand) -> Exact:
        """select_n of two."""
        which, (no, yes) = np.asarray(deciding(which, "select_n"), bool), self.exact(no, yes)
        most = len(no.shape)
        mask = self._padded(which[None], most)[0] if which.ndim < most else which
        return self.field.where(mask, yes, no)

    def decide(self, equation: Any, truth: np.ndarray, x: Exact, y: Exact, part: str = "") -> Known:
        """The truth of a comparison, noted: what follows from it follows from floats."""
        if self.field.coverage is not None:
            self.field.coverage.note(self.field, equation, self.line(equation), truth, (x, y), part)
        return self.field.follow(np.asarray(truth), decision=True)

    def line(self, equation: Any) -> str:
        """Where an equation stands in the user's program."""
        return source_line(equation, self.around)

    def compared(self, equation: Any, x: Operand, y: Operand) -> Known:
        """A comparison; numbers are equal where they are so in the field."""
        x, y = self.exact(x, y)
        name = equation.primitive.name.removesuffix("_to")  # of searchsorted: a total order, NaN last
        if name in ("eq", "ne"):
            equal = self.field.same(x, y) & (self.field.key(x) == self.field.key(y))
            return self.decide(equation, equal if name == "eq" else ~equal, x, y)
        keys = [self.field.key(x), self.field.key(y)]
        if name != equation.primitive.name:
            keys = [np.where(np.isnan(key), math.inf, key) for key in keys]
        return self.decide(equation, _NUMPY[name](*keys), x, y)

    def larger(self, equation: Any, x: Operand, y: Operand) -> Exact:
        """max or min; of what is no number and a number it is none."""
        x, y = self.exact(x, y)
        field, largest = self.field, equation.primitive.name == "max"
        first, second = field.key(x), field.key(y)
        mask = self.decide(equation, first >= second if largest else first <= second, x, y) | np.isnan(first)
        chosen = field.where(mask, x, y)
        extreme = np.maximum(x.sign, y.sign) if largest else np.minimum(x.sign, y.sign)
        decided = extreme > 0 if largest else extreme < 0
        known = chosen.facts.copy()
        known[0] = np.where(decided, extreme, chosen.sign)
        return Exact(chosen.number, known, chosen.real, chosen.factor, chosen.degree)

    def converted(self, equation: Any, x: Exact) -> Operand:
        """A cast: rounding is not modelled; to integers it is that of real values, to booleans a comparison."""
        if np.dtype(equation.params["new_dtype"]).kind == "b":
            return self.decide(equation, self.field.key(x) != 0, x, self._zero(x))
        whole = jnp.issubdtype(equation.params["new_dtype"], jnp.integer)
        if whole and jnp.issubdtype(equation.invars[0].aval.dtype, jnp.floating):
            return self.rounded(equation, x)
        return x

    def rounded(self, equation: Any, x: Exact) -> Operand:
        """floor, ceil, round, a cast to integers and a remainder's quotient: constants between the steps.

        In a draw it is the integer of the real value; where that is next to one, the field knows whether it is it. In
        an order it is uninterpreted, but for constants, as how many comparisons held.
        """
        field, name = self.field, equation.primitive.name
        whole = name == "convert_element_type"
        x = field.plain(x)
        if x.degree.total and field.order is not None:
            return self._rounded_in_an_order("trunc" if whole else name, x)
        if x.degree.total:
            field.uninterpreted.add("to an integer" if whole else name)
        field.key(x)  # refuses values beyond floats
        real = np.where(np.isfinite(x.real[0]), x.real[0], 0.0)
        near = np.rint(real)
        exactly = (np.abs(real - near) < _NEAR * np.maximum(np.abs(real), 1)) & field.same(x, field.lifted(near))
        steps: dict[str, Callable[..., Any]] = {"floor": np.floor, "ceil": np.ceil, "round": np.rint}
        if equation.params.get("rounding_method") == lax.RoundingMethod.AWAY_FROM_ZERO:
            steps["round"] = _round_away
        integers = np.where(exactly, near, steps.get(name, np.trunc)(real))
        if whole:
            return field.follow(integers.astype(equation.params["new_dtype"]))
        constant = replace(field.lifted(integers).signed(0), degree=INPUT)  # its sign is that of this draw
        return field.where((x.poison > 0) | (np.abs(x.infinite) == TRULY), x, constant)

    def _rounded_in_an_order(self, name: str, x: Exact) -> Exact:
        """An uninterpreted floor, and what follows from it: ceil(x) is -floor(-x), trunc one of them by the sign."""
        field = self.field
        if name == "round":
            return field.opaque("round", x)
        down = field.opaque("floor", x)
        up = field.negative(field.opaque("floor", field.negative(x)))
        if name == "trunc":
            return field.where(field.key(x) < 0, up, down)
        return up if name == "ceil" else down

    def _zero(self, x: Exact) -> Exact:
        return self.field.lifted(np.zeros((1,) * len(x.shape), np.float32))

    def bits(self, equation: Any, x: Exact) -> Exact:
        """A float as the integer of its bits, and back."""
        if not jnp.issubdtype(equation.invars[0].aval.dtype, jnp.floating):
            return self.field.of_bits(x)
        return self.field.bits(x)

    def multiplied(self, equation: Any, x: Operand, y: Operand) -> Exact:
        """A product; of a value with itself it is a square, which is positive."""
        same = equation.invars[0] is equation.invars[1]
        x, y = self.exact(x, y)
        if x.factor is None and y.factor is None:  # a root and itself, computed twice
            same = same or (np.array_equal(x.number, y.number) and np.array_equal(x.facts, y.facts))
        return self.field.to_the(x, 2) if same else self.field.mul(x, y)

    def divided(self, equation: Any, x: Operand, y: Operand) -> Exact:
        """A quotient; that of integers drops its rest, and is uninterpreted."""
        x, y = self.exact(x, y)
        if jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.integer):
            return self.field.opaque("div of integers", x, y)
        return self.field.mul(x, self.field.inverse(y))

    def powered(self, equation: Any, x: Operand, y: Operand) -> Exact:
        """pow: to a whole number that is known, a product; else uninterpreted."""
        if not isinstance(y, Exact) and y.size and (y == np.round(y)).all() and np.ptp(y) == 0:
            n = int(y.flat[0])
            if abs(n) <= 1024:
                return self.field.to_the(self.exact(x)[0], n)
        if not isinstance(y, Exact) and y.size and (np.abs(y) == 0.5).all() and np.ptp(y) == 0:
            root = self.field.root(self.exact(x)[0])
            return root if y.flat[0] > 0 else self.field.inverse(root)
        return self.field.opaque("pow", *self.exact(x, y))

    def logistic(self, equation: Any, x: Exact) -> Exact:
        """1 / (1 + exp(-x))."""
        field = self.field
        if field.shallow:
            return field.opaque("logistic", x, sign=1)
        one = field.lifted(np.ones((1,) * len(x.shape), np.float32))
        result = field.inverse(field.add(one, field.exp(field.negative(x))))
        return field.where(x.low, field.lifted(np.zeros(x.shape, np.float32)), result)

    def shifted(self, equation: Any, x: Exact) -> Exact:
        """log1p, expm1 and one_minus_square."""
        field = self.field
        one = field.lifted(np.ones((1,) * len(x.shape), np.float32))
        if equation.primitive.name == "one_minus_square":
            return field.sub(one, field.to_the(x, 2))
        return field.log(field.add(x, one)) if equation.primitive.name == "log1p" else field.sub(field.exp(x), one)

    def absolute(self, equation: Any, x: Exact) -> Exact:
        """abs, by the order."""
        x = self.field.plain(x)
        mask = self.decide(equation, self.field.key(x) >= 0, x, self._zero(x))
        return self.field.where(mask, x, self.field.negative(x)).signed(1)

    def sign(self, equation: Any, x: Exact) -> Exact:
        """sign, by the order, which has a place for every number."""
        key = self.field.key(x)
        self.decide(equation, key > 0, x, self._zero(x))
        return self.field.lifted(np.sign(key).astype(np.float32))

    def root(self, equation: Any, x: Exact) -> Exact:
        """sqrt and rsqrt: inverses of each other."""
        root = self.field.root(x)
        return root if equation.primitive.name == "sqrt" else self.field.inverse(root)

    def finite(self, equation: Any, x: Exact) -> Known:
        """is_finite: inputs are, and what follows from them unless it divides by zero."""
        return (x.poison == 0) & (np.abs(x.infinite) != TRULY)

    def opaque(self, equation: Any, *operands: Operand) -> Exact:
        """A function without a law."""
        return self.field.opaque(equation.primitive.name, *self.exact(*operands))

    def product(self, equation: Any, x: Exact) -> Exact:
        """reduce_prod."""
        for dim in sorted(self.dims(equation), reverse=True):
            result = self.field.lifted(np.ones(x.shape[:dim] + x.shape[dim + 1 :], np.float32))
            for i in range(x.shape[dim]):
                result = self.field.mul(result, x.row(dim, i))
            x = result
        return x

    def extreme(self, equation: Any, x: Exact) -> Exact:
        """reduce_max and reduce_min."""
        dims = self.dims(equation)
        keys = self.field.key(x)
        largest = equation.primitive.name == "reduce_max"
        at = self._place(keys, dims, largest)
        lead = [dim for dim in range(len(x.shape)) if dim not in dims]

        def pick(part: np.ndarray) -> np.ndarray:
            part = part.transpose(0, *(1 + dim for dim in lead), *(1 + dim for dim in dims))
            part = part.reshape(*part.shape[: 1 + len(lead)], -1)
            return np.take_along_axis(part, np.broadcast_to(at, (len(part), *at.shape))[..., None], -1)[..., 0]

        return self.field.plain(x).moved(pick)

    def _place(self, keys: np.ndarray, dims: Sequence[int], largest: bool) -> np.ndarray:
        lead = [dim for dim in range(keys.ndim) if dim not in dims]
        keys = keys.transpose(*lead, *dims)
        keys = keys.reshape(*keys.shape[: len(lead)], -1)
        return np.asarray(keys.argmax(-1) if largest else keys.argmin(-1))

    def arg(self, equation: Any, x: Exact) -> Known:
        """argmax and argmin."""
        largest = equation.primitive.name == "argmax"
        at = self._place(self.field.key(x), self.dims(equation), largest)
        return self.field.follow(at.astype(equation.params["index_dtype"]), natural=True)

    def cumulated(self, equation: Any, x: Exact) -> Exact:
        """cumsum, cumprod, cummax and cummin, term by term."""
        name, dim = equation.primitive.name, self.rank + equation.params["axis"]
        n = x.shape[dim]
        order = range(n - 1, -1, -1) if equation.params["reverse"] else range(n)
        x = self.field.plain(x)
        terms: dict[int, Exact] = {}
        before: Exact | None = None
        for i in order:
            term = x.row(dim, i)
            if before is None:
                before = term
            elif name == "cumsum":
                before = self.field.add(before, term)
            elif name == "cumprod":
                before = self.field.mul(before, term)
            else:
                first, second = self.field.key(before), self.field.key(term)
                mask = (first >= second if name == "cummax" else first <= second) | np.isnan(first)
                before = self.field.where(mask, before, term)
            terms[i] = before
        return stacked(self.field, [terms[i] for i in range(n)], dim, new=True) if n else x

    def dotted(self, equation: Any, x: Operand, y: Operand) -> Exact:
        """dot_general."""
        one, other = (z if isinstance(z, Exact) else self.field.lifted(z) for z in (x, y))
        return self.product_over(one, other, equation.params["dimension_numbers"])

    def product_over(self, x: Exact, y: Exact, numbers: Any) -> Exact:
        """A product with the dimension numbers of a dot_general."""
        (cx, cy), (bx, by) = numbers
        kept = []
        for z, contracted, batch, last in zip((x, y), (cx, cy), (bx, by), (True, False), strict=True):
            mine = z.shape[self.rank :]
            free = [dim for dim in range(len(mine)) if dim not in contracted and dim not in batch]
            order = [*batch, *free, *contracted] if last else [*batch, *contracted, *free]
            sizes = [math.prod(mine[dim] for dim in dims) for dims in (batch, free, contracted)]
            shape = [sizes[0], *((sizes[1], sizes[2]) if last else (sizes[2], sizes[1]))]
            kept.append(z.moved(partial(self._matrix, order=order, shape=shape)))
        product = linear_algebra.known_product(self.field, *kept) or self.field.matmul(*kept)
        own = [x.shape[self.rank + dim] for dim in bx]
        for z, contracted, batch in zip((x, y), (cx, cy), (bx, by), strict=True):
            mine = z.shape[self.rank :]
            own += [size for dim, size in enumerate(mine) if dim not in contracted and dim not in batch]
        return product.moved(lambda part: part.reshape((*part.shape[: 1 + self.rank], *own)))

    def _matrix(self, part: np.ndarray, order: Sequence[int], shape: Sequence[int]) -> np.ndarray:
        lead = 1 + self.rank
        return part.transpose(*range(lead), *(lead + dim for dim in order)).reshape(*part.shape[:lead], *shape)

    def grouped(self, equation: Any, x: Operand, w: Operand, sizes: Known) -> Exact:
        """ragged_dot: the rows of x, sorted by group, times the matrix of their group; or those sums by group."""
        params = equation.params["ragged_dot_dimension_numbers"]
        [ragged] = params.lhs_ragged_dimensions
        (cx, cy), (bx, by) = params.dot_dimension_numbers
        if bx or by:
            raise UnsupportedError("ragged_dot_general with batch dims")
        sizes = deciding(sizes, "ragged_dot_general")
        x, w = self.exact(x)[0], self.exact(w)[0]
        rows = np.arange(x.shape[self.rank + ragged])
        ends = np.cumsum(sizes, -1)[..., None]
        mine = ((rows >= ends - np.asarray(sizes)[..., None]) & (rows < ends)).astype(np.int32)  # [.., group, row]
        own = [1] * (len(x.shape) - self.rank)
        own[ragged] = len(rows)
        results = []
        for group in range(mine.shape[self.rank]):
            mask = np.take(mine, group, self.rank)
            here = self.field.mul(x, self.field.lifted(mask.reshape(*mask.shape[: self.rank], *own)))
            matrix, numbers = w, (cx, cy)
            if params.rhs_group_dimensions:
                [at] = params.rhs_group_dimensions
                matrix = w.row(self.rank + at, group)
                numbers = cx, tuple(dim - (dim > at) for dim in cy)
            results.append(self.product_over(here, matrix, (numbers, ((), ()))))
        if not params.rhs_group_dimensions:
            return stacked(self.field, results, self.rank, new=True)
        total = results[0]
        for result in results[1:]:
            total = self.field.add(total, result)
        return total

    def scattered(self, equation: Any, operand: Operand, indices: Known, updates: Operand) -> Exact:
        """scatter and scatter-add: the place of each update is what a gather with the same numbers reads there."""
        indices = deciding(indices, equation.primitive.name)
        operand, updates = self.exact(operand)[0], self.exact(updates)[0]
        numbers = equation.params["dimension_numbers"]
        own = operand.shape[self.rank :]
        window = iter(equation.invars[2].aval.shape[dim] for dim in numbers.update_window_dims)
        without = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        sizes = tuple(1 if dim in without else next(window) for dim in range(len(own)))
        reads = lax.GatherDimensionNumbers(
            offset_dims=numbers.update_window_dims,
            collapsed_slice_dims=numbers.inserted_window_dims,
            start_index_map=numbers.scatter_dims_to_operand_dims,
            operand_batching_dims=numbers.operand_batching_dims,
            start_indices_batching_dims=numbers.scatter_indices_batching_dims,
        )
        size = math.prod(own)
        places = jnp.arange(size, dtype=jnp.int32).reshape(own)
        clips = equation.params["mode"] == lax.GatherScatterMode.CLIP
        mode = "clip" if clips else "fill"  # what is out of bounds is written nowhere

        def where(at: Any) -> Any:
            return lax.gather(places, jnp.asarray(at), reads, sizes, mode=mode, fill_value=size)

        lead = np.broadcast_shapes(*(x.shape[: self.rank] for x in (operand, indices, updates)))
        n = math.prod(lead)
        each = np.broadcast_to(indices, lead + indices.shape[self.rank :]).reshape(n, *indices.shape[self.rank :])
        at: Any = np.asarray(jax.vmap(where)(each)).reshape(n, -1)
        rows = np.broadcast_to(np.arange(n)[:, None], at.shape)
        adds = equation.primitive.name.startswith("scatter-add") or equation.primitive.name == "scatter_add"
        operand, updates = self.field.plain(operand), self.field.plain(updates)

        def written(old: np.ndarray, new: np.ndarray, add: bool) -> np.ndarray:
            old = np.broadcast_to(old, (len(old), *lead, *own)).reshape(len(old), n, size)
            new = np.broadcast_to(new, (len(new), *lead, *new.shape[1 + self.rank :])).reshape(len(new), n, -1)
            result = np.concatenate([old, np.zeros((len(old), n, 1), old.dtype)], -1)
            if add:
                np.add.at(result, (slice(None), rows, np.asarray(at)), new)  # type: ignore[arg-type]
            else:
                result[:, rows, at] = new
            return result[..., :-1].reshape(len(old), *lead, *own)

        number = written(operand.number, updates.number, adds)
        real = written(operand.real, updates.real, adds)
        known = written(operand.facts, updates.facts, False)
        if adds:
            known[0] = (operand.sign == 1).all() and (updates.sign == 1).all()
            old, new = operand.infinite.astype(np.int64), updates.infinite.astype(np.int64)
            known[1] = np.sign(written(old[None], new[None], True)[0])
            known[2] = max(operand.used[0].max(initial=0), updates.used[0].max(initial=0))
            if operand.special or updates.special:
                known[1], known[4] = self._scattered_specials(operand, updates, written)
        degree = operand.degree.plus(updates.degree)
        return self.field.settled(Exact(number % self.field.p(number), known, real, degree=degree))

    def _scattered_specials(
        self, operand: Exact, updates: Exact, written: Callable[..., np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Which sums of a scatter-add are infinite, and which no number."""

        def somewhere(old: np.ndarray, new: np.ndarray) -> np.ndarray:
            return np.asarray(written(old[None].astype(np.int64), new[None].astype(np.int64), True)[0] > 0)

        up = somewhere(operand.infinite == TRULY, updates.infinite == TRULY)
        down = somewhere(operand.infinite == -TRULY, updates.infinite == -TRULY)
        poison = np.where(up & down, self.field.created, 0)
        for code in (NOT_A_NUMBER, OUTSIDE):
            poison = np.maximum(poison, np.where(somewhere(operand.poison == code, updates.poison == code), code, 0))
        return np.where(up, TRULY, 0) + np.where(down, -TRULY, 0), poison

    def sorted(self, equation: Any, *operands: Operand) -> list[Operand]:
        """sort, by the order of the field where the operand is in it."""
        dim, keyed = self.rank + equation.params["dimension"], equation.params["num_keys"]
        keys = [self.field.key(x) if isinstance(x, Exact) else np.asarray(x) for x in operands[:keyed]]
        shape = np.broadcast_shapes(*(x.shape for x in operands))
        keys = [np.broadcast_to(key, shape) for key in keys]
        at = np.lexsort([np.moveaxis(key, dim, -1) for key in reversed(keys)], -1)
        at = np.moveaxis(at, -1, dim)
        by_floats = any(isinstance(x, Exact) for x in operands[:keyed])
        results = [self._along(x, at, dim, shape) for x in operands]
        if not by_floats:
            return results
        for x, y in zip(operands, results, strict=True):
            if not isinstance(y, Exact):
                self.field.follow(y, natural=self.field.is_natural(x))
        return results

    def _along(self, x: Operand, at: np.ndarray, dim: int, shape: tuple[int, ...]) -> Operand:
        if isinstance(x, Exact):
            return x.moved(
                lambda part: np.take_along_axis(
                    np.broadcast_to(part, (len(part), *shape)), np.broadcast_to(at, (len(part), *at.shape)), dim + 1
                )
            )
        return np.take_along_axis(np.broadcast_to(x, shape), at, dim)

    def top(self, equation: Any, x: Exact) -> list[Operand]:
        """top_k, and approx_top_k as if it missed none."""
        params, dims = equation.params, len(x.shape) - self.rank
        k, last = params["k"], params.get("reduction_dimension", dims - 1)
        dim = self.rank + params.get("axis", last) % dims
        if not params.get("aggregate_to_topk", True):
            raise UnsupportedError("approx_top_k with aggregate_to_topk=False")
        keys = self.field.key(x)
        if not params.get("is_max_k", True):
            keys = -keys
        keys = np.where(np.isnan(keys), math.inf, keys)  # what is no number comes first
        at = np.take(np.argsort(-keys, axis=dim, kind="stable"), range(k), dim)
        return [self._along(x, at, dim, x.shape), self.field.follow(at.astype(np.int32), natural=True)]

    def clamped(self, equation: Any, low: Operand, x: Operand, high: Operand) -> Exact:
        """clamp: below, between and above are three cases."""
        field = self.field
        low, x, high = self.exact(low, x, high)
        lowest, key, highest = field.key(low), field.key(x), field.key(high)
        below = self.decide(equation, key < lowest, x, low, " from below")
        above = self.decide(equation, key > highest, x, high, " from above")
        if field.coverage is not None:
            between = ~below & ~above & ~np.isnan(key)
            field.coverage.note_joined(field, equation, self.line(equation), between, " between")
        return field.where(above, high, field.where(below, low, x))


# Primitives that put floats in order.
ORDERED = {
    *("max", "min", "clamp", "abs", "sign", "sort", "top_k", "eq", "ne", "lt", "le", "gt", "ge"),
    *("reduce_max", "reduce_min", "argmax", "argmin", "cummax", "cummin", "pmax", "pmin"),
    *("reduce_window_max", "reduce_window_min", "reduce_window", "select_and_scatter_add", "select_and_gather_add"),
}


def _all(n: int) -> range:
    return range(n)


def _first(n: int) -> range:
    return range(1)


# Primitives that only move elements, with the operands that are moved; the others are indices.
_MOVES: dict[str, Callable[[int], range]] = {
    **dict.fromkeys(("gather", "dynamic_slice", "split"), _first),
    **dict.fromkeys(("pad", "tile"), _all),
    "dynamic_update_slice": lambda n: range(2),
    "select_n": lambda n: range(1, n),
}
# Primitives that are refused, and what to know of them.
_WITHOUT_MEANING = {
    "fft": "whose numbers are complex (a product with matrices of cosines and sines has one)",
    "eig": "whose values may be complex (eigh of a symmetric matrix has one)",
    "schur": "which is one of many (eigh of a symmetric matrix has a meaning)",
    "hessenberg": "which is one of many (qr has a meaning)",
    "geqrf": "a form of qr that its library chooses (qr has a meaning)",
    "geqp3": "whose order of columns follows from floats (qr has a meaning)",
    "householder_product": "of a form of qr that its library chooses (qr has a meaning)",
}
_RULES: dict[str, Callable[..., Any]] = {
    "add": lambda rules, _, x, y: rules.field.add(*rules.exact(x, y)),
    "add_any": lambda rules, _, x, y: rules.field.add(*rules.exact(x, y)),
    "sub": lambda rules, _, x, y: rules.field.sub(*rules.exact(x, y)),
    "neg": lambda rules, _, x: rules.field.negative(x),
    "exp": lambda rules, _, x: rules.field.exp(x),
    "log": lambda rules, _, x: rules.field.log(x),
    "square": lambda rules, _, x: rules.field.to_the(x, 2),
    "is_finite": Rules.finite,
    "bitcast_convert_type": Rules.bits,
    "mul": Rules.multiplied,
    "div": Rules.divided,
    "integer_pow": lambda rules, equation, x: rules.field.to_the(x, equation.params["y"]),
    "pow": Rules.powered,
    "logistic": Rules.logistic,
    "abs": Rules.absolute,
    "sign": Rules.sign,
    "convert_element_type": Rules.converted,
    "select_n": Rules.selected,
    "clamp": Rules.clamped,
    "reduce_sum": lambda rules, equation, x: rules.field.total(x, rules.dims(equation)),
    "reduce_prod": Rules.product,
    "dot_general": Rules.dotted,
    "ragged_dot_general": Rules.grouped,
    "sort": Rules.sorted,
    "top_k": Rules.top,
    "approx_top_k": Rules.top,
    "triangular_solve": linear_algebra.solve_triangular,
    "tridiagonal_solve": linear_algebra.solve_tridiagonal,
    "lu": linear_algebra.factor_lu,
    "cholesky": linear_algebra.factor_cholesky,
    "qr": linear_algebra.factor_qr,
    "eigh": linear_algebra.factor_symmetric,
    "svd": linear_algebra.factor_singular,
    **dict.fromkeys(("log1p", "expm1", "one_minus_square"), Rules.shifted),
    **dict.fromkeys(("sqrt", "rsqrt"), Rules.root),
    **dict.fromkeys(("max", "min"), Rules.larger),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge", "lt_to", "le_to"), Rules.compared),
    **dict.fromkeys(("reduce_max", "reduce_min"), Rules.extreme),
    **dict.fromkeys(("argmax", "argmin"), Rules.arg),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin"), Rules.cumulated),
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add"), Rules.scattered),
    "conv_general_dilated": windows.convolve,
    "reduce_window": windows.reduce_windows,
    "reduce_window_sum": windows.add_windows,
    "select_and_scatter_add": windows.scatter_to_extremes,
    "select_and_gather_add": windows.gather_from_extremes,
    "cumlogsumexp": windows.cumulate_logs,
    **dict.fromkeys(("reduce_window_max", "reduce_window_min"), windows.take_extremes),
    **dict.fromkeys(("floor", "ceil", "round"), Rules.rounded),
    **dict.fromkeys(
        [
            "tanh",
            "sin",
            "cos",
            "tan",
            "asin",
            "acos",
            "atan",
            "sinh",
            "cosh",
            "asinh",
            "acosh",
            "atanh",
            "atan2",
            "erf",
            "erfc",
            "erf_inv",
            "cbrt",
            "exp2",
            "log2",
            "rem",
            "lgamma",
            "digamma",
            "nextafter",
        ],
        Rules.opaque,
    ),
}
