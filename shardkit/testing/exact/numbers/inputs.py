"""Inputs of a program: random residues, and real values that are drawn as inputs of many kinds are.

The residues decide whether results are equal. The real values decide which branch is taken, so they are drawn in ways
that reach other branches: large and small, of one sign, near the constants that are compared, and equal to each other.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shardkit.testing.exact.numbers.assembly import where
from shardkit.testing.exact.numbers.field import ANY, KINDS, MIXED, NARROW, ROWS, SIMILAR, WHOLE, Field
from shardkit.testing.exact.numbers.values import INPUT, Exact, build_facts

_WIDTHS = {"wide": 16.0, NARROW: 0.1, "tiny": 1e-3, "tiniest": 1e-6, "large": 1e3}
_MOST_INTEGERS = 4  # to which inputs that are rounded are put
_LARGEST_PLANTED = math.log(1e4)  # of the logarithm of a constant that inputs are drawn as


def draw_input(field: Field, name: str, shape: Sequence[int]) -> Exact:
    """An input: a random number for every component and element, and a random real value for every element."""
    # Both programs draw their inputs by name: an input of the same name is the same in both.
    x = field.notes.inputs.get(name)
    if x is None or x.shape != tuple(shape):
        x = _draw_input(field, name, shape)
        field.notes.inputs[name] = x
    return x


def _draw_input(field: Field, name: str, shape: Sequence[int]) -> Exact:
    """An input that the field has not drawn yet.

    Worked example: x of shape [2] with the primes 5 and 11 and one point is [[3, 1], [7, 10]], in which no residue is
    zero, with the real values [-0.4, 1.1], and has degree 1.
    """
    size = math.prod(shape)
    digest = hashlib.blake2b(name.encode(), digest_size=6).digest()
    rng = np.random.default_rng([field.settings.seed, int.from_bytes(digest, "big")])
    moduli = field.residues.moduli
    # [components, elements], from 1 to p - 1: an input is not zero, as almost all floats are not.
    number = rng.integers(1, moduli[:, None], (len(moduli), size), np.uint64)
    number = number.reshape(len(number), *shape)
    kind = field.settings.kind
    kind_of_real = kind
    if kind == ANY:
        kind_of_real = KINDS[rng.integers(len(KINDS))]
    real = draw_real(field, rng, kind_of_real, (1, *shape))
    x = Exact(number, build_facts(shape), real, degree=INPUT)
    x = _plant(field, rng, kind, x)
    return _place_elements(field, name, x)


def _plant(field: Field, rng: np.random.Generator, kind: str, x: Exact) -> Exact:
    """The input of a kind whose elements or rows are equal, or zero; of all other kinds x itself."""
    if kind == "zero":
        return field.lift(np.zeros(x.shape, np.float32))
    if kind == WHOLE:
        return _lift_input(field, draw_whole(rng, x.shape))
    if not math.prod(x.shape):
        return x
    if kind == "alike" and x.shape:
        return x.move(lambda part: np.broadcast_to(part[:, :1], part.shape))
    if kind == "repeated":
        return _repeat_elements(field, rng, x)
    if kind == ROWS:
        return _plant_rows(field, rng, x)
    return x


def draw_real(field: Field, rng: np.random.Generator, kind: str, shape: Sequence[int]) -> np.ndarray:
    """Real values of a kind; those near constants are drawn near the field's."""
    if kind == MIXED:
        values_by_kind = np.stack([draw_real(field, rng, plain_kind, shape) for plain_kind in KINDS])
        kinds = rng.integers(len(KINDS), size=(1, *shape))
        return np.asarray(np.take_along_axis(values_by_kind, kinds, 0)[0])
    if kind == SIMILAR:
        return _draw_similar(field, rng, shape)
    real = rng.normal(size=shape) * field.settings.scale
    if kind == "positive":
        return np.asarray(np.exp(real))
    if kind == "negative":
        return np.asarray(-np.exp(real))
    if kind in _WIDTHS:
        return np.asarray(real * _WIDTHS[kind])
    if kind == "unit":
        return rng.uniform(size=shape)
    if kind == "near":  # about the constants that are compared, and between two of them
        return _draw_near(list_compared_constants(field), rng, real)
    return np.asarray(real)


def _draw_similar(field: Field, rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Real values that differ by little along some dims.

    The minimum of four clipped rows is between its bounds only if no row is below: of rows that are drawn one by one,
    in one draw of hundreds; of similar ones, in one of three.
    """
    is_alike = rng.uniform(size=len(shape)) < 0.5
    sizes = np.where(is_alike, 1, shape).tolist()
    kind = str(rng.choice(KINDS))
    centres = draw_real(field, rng, kind, sizes)
    distances = 0.1 * np.maximum(np.abs(centres), 1) * rng.normal(size=shape)
    return np.asarray(centres + distances * field.settings.scale)


def _draw_near(constants: Sequence[float], rng: np.random.Generator, real: np.ndarray) -> np.ndarray:
    """Real values about constants, half of them between a constant and the next: 3 and 3.001 leave little room."""
    places = rng.integers(len(constants), size=real.shape)
    centres = np.take(constants, places)
    about = centres + 0.3 * np.maximum(np.abs(centres), 1) * real
    if len(constants) < 2:
        return np.asarray(about)
    ordered = np.unique(constants)
    gaps = np.diff(ordered)
    places = rng.integers(len(gaps), size=real.shape)
    share = rng.uniform(size=real.shape)
    between = ordered[places] + share * gaps[places]
    is_about = rng.uniform(size=real.shape) < 0.5
    return np.where(is_about, about, between)


def _place_elements(field: Field, name: str, x: Exact) -> Exact:
    """An input with the elements whose values the field prescribes."""
    elements = [element for element in field.choices.elements if element.name == name]
    if not elements:
        return x
    number = x.number.reshape(len(x.number), -1).copy()
    real = x.real.reshape(1, -1).copy()
    for element in elements:
        number[:, element.place] = element.number
        real[:, element.place] = element.real
    return replace(x, number=number.reshape(x.number.shape), real=real.reshape(x.real.shape))


def _repeat_elements(field: Field, rng: np.random.Generator, x: Exact) -> Exact:
    """An input of which many elements are equal: to one of the first half, to the one before, or to a constant.

    Worked example, of four elements: each is one of x[0] and x[1], or stays, as at the places [0, 1, 0, 3]. If the
    last repeats its neighbour, it is x[0] too. If the second one is to be a constant that was compared, such as 0, the
    input is [x[0], 0, x[0], x[0]].
    """
    size = math.prod(x.shape)
    repeats_another = rng.uniform(size=size) < 0.5
    places_in_first_half = rng.integers(0, (size + 1) // 2, size)
    places = np.where(repeats_another, places_in_first_half, np.arange(size))
    repeats_neighbour = rng.uniform(size=size) < 0.3
    places = np.where(repeats_neighbour, np.roll(places, 1), places)

    def take_places(part: np.ndarray) -> np.ndarray:
        flat = part.reshape(len(part), -1)
        return flat[:, places].reshape(part.shape)

    x = x.move(take_places)
    constants = rng.choice(list_compared_constants(field), size=x.shape)
    is_constant = rng.uniform(size=x.shape) < 0.4
    return where(is_constant, field.lift(constants.astype(np.float32)), x)


def _lift_input(field: Field, values: np.ndarray) -> Exact:
    """Values of an input: it has a degree, and a sign that is not known, as it is another number in another draw."""
    return field.lift(values).as_unknown(INPUT)


def draw_whole(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """float32 [...]: whole numbers from -3 to 3, or halves of these."""
    numerators = rng.integers(-3, 4, shape)
    return (numerators / rng.choice([1, 1, 2])).astype(np.float32)


def _plant_rows(field: Field, rng: np.random.Generator, x: Exact) -> Exact:
    """An input in which some rows are zero, of one number each, equal to the first row, or a compared constant.

    What a row is, is drawn: of x [batch, tokens, width] it may be the width of a token, or the tokens of an example.
    Worked example, of x [3, 2]: dim 0 counts rows. Row 0 stays as it is, (0.3, -1.2), row 1 is as row 0, and row 2 is
    zero: then `(x * x).sum(1)` has two equal elements and a zero, as no draw of single elements has.
    """
    counts_rows = rng.uniform(size=len(x.shape)) < 0.5
    sizes = np.where(counts_rows, x.shape, 1)
    choices = rng.integers(5, size=sizes)
    # All rows are of one kind in half of the draws: a condition of four rows holds for one draw in hundreds otherwise.
    if rng.uniform() < 0.5:
        choices = np.full(sizes, rng.integers(5))
    choices = np.broadcast_to(choices, x.shape)
    # Zero rows are a choice of their own, so that these are of the other constants, if there are any.
    compared = list_compared_constants(field)[1:] or [0.0]
    constants = rng.choice(compared, size=sizes)
    constants = np.broadcast_to(constants, x.shape).astype(np.float32)
    kinds_of_rows = [
        _repeat_first(x, ~counts_rows),  # the first number of each row
        _repeat_first(x, counts_rows),  # the first row
        field.lift(np.zeros(x.shape, np.float32)),
        _lift_input(field, constants),
    ]
    for choice, rows in enumerate(kinds_of_rows, 1):
        x = where(choices == choice, rows, x)
    return x


def _repeat_first(x: Exact, dims: np.ndarray) -> Exact:
    """The first elements along some dims, bool [dims], in place of all."""

    def repeat(part: np.ndarray) -> np.ndarray:
        first = part
        for dim in np.flatnonzero(dims):
            first = first.take([0], dim + 1)
        return np.broadcast_to(first, part.shape)

    return x.move(repeat)


def choose_compared_integers(field: Field) -> list[float]:
    """Some of the integers among zero and the constants that were compared; the same ones in all runs of a draw."""
    constants = np.round(list_compared_constants(field), 6)
    integers = constants[constants == np.rint(constants)]
    rng = np.random.default_rng(field.settings.seed)
    chosen: list[float] = rng.permutation(integers)[:_MOST_INTEGERS].tolist()
    return chosen


def list_compared_constants(field: Field) -> list[float]:
    """Zero, and the constants that were compared, with both signs."""
    constants = [0.0]
    for logarithm in field.choices.centres:
        if abs(logarithm) < _LARGEST_PLANTED:
            constants += [math.exp(logarithm), -math.exp(logarithm)]
    return constants
