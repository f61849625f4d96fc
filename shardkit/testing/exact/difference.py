"""From a wrong result to the line: the first value that the reference does not have, and how it differs.

Both programs run once more, keeping every value. A value of the distributed program is whole on every device, split
along a dim, or a partial sum; put together in one of these ways it is looked up among the reference's values. From the
wrong result backwards, through values that the reference does not have, to the equations whose operands it has: the
first of them that has a partial sum as an operand, else the first.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from shardkit._arguments.checks import quoted
from shardkit._jax.jaxprs import source_line
from shardkit._jax.primitives import registered
from shardkit.testing.exact.field import Field
from shardkit.testing.exact.interpreter import DiffersError, Seen
from shardkit.testing.exact.rules import Operand
from shardkit.testing.exact.tower import PRIMES
from shardkit.testing.exact.values import Exact

_MOST_FORMS = 64


class Runs(NamedTuple):
    """Both programs, in the field in which they differ."""

    field: Field
    on_mesh: Callable[[Field, Seen | None], list[Operand]]
    alone: Callable[[Field, Seen | None], list[Operand]]


class _Made(NamedTuple):
    """How a value was made."""

    equation: Any
    operands: tuple[Any, ...]
    value: Operand
    axes: Mapping[str, int]
    around: str

    @property
    def name(self) -> str:
        """That of the primitive."""
        return str(self.equation.primitive.name)

    def __str__(self) -> str:
        return f"{self.name} at {source_line(self.equation, self.around)}"


# Equations that only pass elements on: a value's origin is behind them.
_PASS = ("broadcast_in_dim", "convert_element_type", "reshape", "scan", "shard_map", "squeeze", "transpose")
_ZERO = "the reference's is zero"


def located(runs: Runs, index: int, wanted: Exact | None) -> str:
    """Where and how the result of this number differs, as the end of a sentence.

    Without `wanted` it is the value that differs between devices.
    """
    field = runs.field
    known: set[bytes] = set()

    def keep(equation: Any, operands: Any, results: Any, *_: Any) -> None:
        known.update(_digest(_top(field, x)) for x in (*operands, *results) if _is_float(x))

    runs.alone(field, keep)
    made: dict[int, _Made] = {}

    def note(equation: Any, operands: Any, results: Any, axes: Mapping[str, int], around: str) -> None:
        known.update(_digest(_top(field, x)) for x in operands if isinstance(x, Exact) and id(x) not in made)  # inputs
        summed = registered(equation.primitive.name).kind  # as a count of tokens
        for x in results:
            if id(x) not in made and (isinstance(x, Exact) or (summed and _is_float(x))):
                made[id(x)] = _Made(equation, tuple(operands), x, axes, around)

    try:
        got = runs.on_mesh(field, note)[index]
    except DiffersError as error:
        got = error.value
    return _told(field, known, made, got, wanted)


def _is_float(x: Operand) -> bool:
    return isinstance(x, Exact) or x.dtype.kind == "f"


def _told(field: Field, known: set[bytes], made: dict[int, _Made], got: Any, wanted: Exact | None) -> str:
    held: dict[int, str | None] = {}

    def explained(x: Any) -> str | None:
        """As what the reference has a value, "" for whole or split; None if it does not."""
        if id(x) not in made:
            return ""
        if id(x) not in held:
            step = made[id(x)]
            if step.name in ("scan", "ppermute") and all(explained(y) is not None for y in step.operands):
                held[id(x)] = ""
            else:
                held[id(x)] = next((how for form, how in _forms(field, x, step.axes) if _digest(form) in known), None)
        return held[id(x)]

    def origin(x: Any) -> _Made | None:
        """The equation that made a value, behind those that only passed it on."""
        step = made.get(id(x))
        while step and step.name in _PASS and (before := [made[id(y)] for y in step.operands if id(y) in made]):
            step = before[0]
        return step

    last = origin(got)
    entries: list[_Made] = []
    waiting, visited = [got], set()
    while waiting:
        x = waiting.pop()
        if id(x) in visited or explained(x) is not None:
            continue
        visited.add(id(x))
        own = [y for y in made[id(x)].operands if explained(y) is None]
        if not own:
            entries.append(last if made[id(x)].name == "shard_map" and last else made[id(x)])
        varying = [y for y in own if max(y.shape[: len(made[id(y)].axes)], default=1) > 1]
        waiting += (varying if wanted is None else []) or own
    relation = "" if wanted is None else _relation(field, got, wanted)
    if how := explained(got):
        relation = f"only{how} it is a value of the reference"
    if not entries or relation == _ZERO:
        return (f": {relation}" if relation else "") + (f"; it comes from {last}" if last else "")
    places = {id(step): place for place, step in enumerate(made.values())}
    first = min(entries, key=lambda step: (not any(map(explained, step.operands)), places[id(step)]))
    partial = [how for how in map(explained, first.operands) if how]
    text = f": {relation or _factor(field, known, first)}".rstrip(": ")
    uses = f", of a value that is the reference's only{partial[0]}" if partial else ""
    ends = f"; the result comes from {last}" if relation and str(last) != str(first) else ""
    return f"{text}. The first value that the reference does not have is that of {first}{uses}{ends}"


def _relation(field: Field, got: Operand, wanted: Exact) -> str:
    """How a result differs: by a factor, or in the order of its pieces."""
    a, b = (_top(field, x) for x in (got, wanted))
    if a.shape != b.shape:
        return ""
    if not b.any():
        return _ZERO
    if not a.any():
        return "it is zero"
    for ratio, text in _ratios({}):
        if np.array_equal(a, b * _residue(field, ratio) % _prime(field)):
            return f"it is {text} the reference everywhere"
    for dim in range(1, b.ndim):
        for by in range(1, b.shape[dim]):
            if np.array_equal(a, np.roll(b, by, dim)):
                return f"it is the reference rolled by {by} along dim {dim - 1}: devices have each other's pieces"
    return ""


def _ratios(axes: Mapping[str, int]) -> Iterator[tuple[Fraction, str]]:
    """Factors that a wrong program may have, and their words."""
    for name, n in axes.items():
        yield Fraction(n), f"{n} times, the size of {name!r},"
        yield Fraction(1, n), f"1/{n} of, by the size of {name!r},"
    yield Fraction(-1), "minus"
    for n in range(2, 65):
        yield Fraction(n), f"{n} times"
        yield Fraction(1, n), f"1/{n} of"


def _factor(field: Field, known: set[bytes], step: _Made) -> str:
    forms = list(itertools.islice(_forms(field, step.value, step.axes), _MOST_FORMS))
    for ratio, text in _ratios(step.axes):
        inverse = _residue(field, 1 / ratio)
        for form, how in forms:
            if _digest(form * inverse % _prime(field)) in known:
                return f"it is {text} a value of the reference{how}"
    return ""


def _prime(field: Field) -> np.uint64:
    """That of the components that every value has."""
    return np.uint64(PRIMES[-2])


def _residue(field: Field, ratio: Fraction) -> np.uint64:
    p = int(_prime(field))
    return np.uint64(ratio.numerator * pow(ratio.denominator, -1, p) % p)


def _top(field: Field, x: Operand) -> np.ndarray:
    """The components that every value has."""
    return field.plain(x if isinstance(x, Exact) else field.lifted(x)).number[-2 * field.points : -field.points]


def _forms(field: Field, x: Operand, axes: Mapping[str, int]) -> Iterator[tuple[np.ndarray, str]]:
    """The arrays that a value of all devices may be a part of, and how."""
    number = _top(field, x)
    rank = len(axes)
    ways: list[list[tuple[Any, int, str]]] = []
    for at, name in enumerate(axes):
        if number.shape[1 + at] == 1:
            ways.append([("whole", at, name)])
        else:
            dims = range(number.ndim - 1 - rank)
            ways.append([("first", at, name), ("sum", at, name), *((dim, at, name) for dim in dims)])
    for choice in itertools.islice(itertools.product(*ways), _MOST_FORMS):
        form: Any = number
        how: list[str] = []
        for way, at, name in reversed(choice):
            if form is None:
                break
            if way == "sum":
                form = form.sum(1 + at, np.uint64, keepdims=True) % _prime(field)
                how.append(name)
            elif way == "first":
                first = np.take(form, [0], 1 + at)
                form = first if (form == first).all() else None
            elif way != "whole":
                to = 1 + rank + way
                form = np.moveaxis(form, 1 + at, to - 1)
                shape = form.shape
                form = form.reshape((*shape[: to - 1], shape[to - 1] * shape[to], *shape[to + 1 :]))
                form = np.expand_dims(form, 1 + at)
        if form is not None:
            yield form, f" summed over {quoted(how)}" if how else ""


def _digest(x: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(x).tobytes(), digest_size=12).digest()
