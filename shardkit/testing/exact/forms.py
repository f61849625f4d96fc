"""What a value of all devices may be a part of, so that it is found among the values of a program for one device.

A value of the program on the mesh is whole on every device, split along a dim, or a partial sum.

Worked example: x has the shape [2] + [4, 3], two devices along "data" with [4, 3] each. Its forms are

    first    [1] + [4, 3], if both devices have the same
    sum      [1] + [4, 3], "summed over 'data'"
    dim 0    [1] + [8, 3], the rows of device 0, then those of device 1
    dim 1    [1] + [4, 6]

Only residues modulo one prime are compared, by a digest of the array.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from shardkit._arguments.checks import quote
from shardkit.testing.exact.numbers.errors import NestedLogarithmsError
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.logarithms import to_number
from shardkit.testing.exact.numbers.orders import highest_residues
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.rules.operands import Operand, lift_operand

_MOST_FORMS = 64
_MOST_BLOCKS = 512


def is_number(x: Operand) -> bool:
    """Whether a value is of the field, or an array of floats."""
    return isinstance(x, Exact) or x.dtype.kind == "f"


def take_residues(field: Field, x: Operand) -> np.ndarray:
    """The residues that every value has, [points, ...]."""
    lifted = lift_operand(field, x)
    try:
        number = to_number(field, lifted)
    except NestedLogarithmsError:
        # Logarithms are nested deeper on the way to a value than in any comparison or result. Such a value is known
        # again where it was computed alike.
        hashes = field.residues.hash("nested", lifted.number, lifted.factor_or_ones)
        number = replace(lifted, number=hashes, factor=None)
    return highest_residues(field, number)


def digest(residues: np.ndarray) -> bytes:
    """A digest of an array of residues, without its shape."""
    return hashlib.blake2b(np.ascontiguousarray(residues).tobytes(), digest_size=12).digest()


def digest_value(field: Field, x: Operand) -> bytes:
    """The digest of a value."""
    return digest(take_residues(field, x))


def sign_value(field: Field, x: Operand) -> Any:
    """A signature of a value: equal values have equal ones."""
    if isinstance(x, Exact):
        return x.shape, digest_value(field, x), x.poison.tobytes()
    x = np.asarray(x)
    return x.shape, x.dtype, x.tobytes()


def list_forms(field: Field, x: Operand, axes: Mapping[str, int]) -> Iterator[tuple[np.ndarray, str]]:
    """The arrays that a value of all devices may be a part of, and how in words: "" but for sums.

    Worked example: x of two devices, [2] + [4, 3]. It may be the same on both, of which one is taken, [4, 3], if they
    are equal; a term of a sum, [4, 3], " summed over 'data'"; or a piece along dim 0, [8, 3], or dim 1, [4, 6].
    """
    residues = take_residues(field, x)
    rank = len(axes)
    if residues.ndim <= rank:  # a literal of the program, which has no dims of devices
        yield residues, ""
        return
    dims = residues.ndim - 1 - rank
    # For each axis what its devices may have: the same, the first's, terms of a sum, or pieces along a dim.
    choices: list[list[Any]] = []
    for number in range(rank):
        if residues.shape[1 + number] == 1:
            choices.append(["whole"])
        else:
            choices.append(["first", "sum", *range(dims)])
    for choice in itertools.islice(itertools.product(*choices), _MOST_FORMS):
        form = _put_all_together(field.residues.top_prime, residues, choice)
        if form is not None:
            yield form, _describe_sum(axes, choice)


def _describe_sum(axes: Mapping[str, int], choice: Sequence[Any]) -> str:
    """Over which axes a form is a sum, in words: the last axis first; "" if it is none."""
    summed_axes = [name for name, part in zip(axes, choice, strict=True) if part == "sum"]
    if not summed_axes:
        return ""
    summed_axes.reverse()
    return f" summed over {quote(summed_axes)}"


def _put_all_together(prime: np.uint64, residues: np.ndarray, choice: Sequence[Any]) -> np.ndarray | None:
    """The pieces of devices along all axes as one array; None if they are not equal where they should be."""
    form = residues
    rank = len(choice)
    # The last axis first: of a dim that is split over several, it is the minor one.
    for number in reversed(range(rank)):
        joined = _put_together(prime, form, number, choice[number], rank)
        if joined is None:
            return None
        form = joined
    return form


def _put_together(prime: np.uint64, form: np.ndarray, number: int, choice: Any, rank: int) -> np.ndarray | None:
    """The pieces of devices along an axis as one array; None if they are not equal and should be."""
    lead = 1 + number
    if choice == "whole":
        return form
    if choice == "sum":
        return form.sum(lead, np.uint64, keepdims=True) % prime
    if choice == "first":
        first = np.take(form, [0], lead)
        if (form == first).all():
            return first
        return None
    # The dim of the axis moves in front of the dim that is split, and both become one.
    dim = 1 + rank + choice
    form = np.moveaxis(form, lead, dim - 1)
    shape = form.shape
    form = form.reshape(*shape[: dim - 1], shape[dim - 1] * shape[dim], *shape[dim + 1 :])
    return np.expand_dims(form, lead)


def list_blocks(residues: np.ndarray, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """The blocks of a shape that an array [points, ...] consists of: none if its dims are no multiples."""
    if residues.ndim != 1 + len(shape) or 0 in shape:
        return
    counts = []
    for size, part in zip(residues.shape[1:], shape, strict=True):
        if size % part:
            return
        counts.append(size // part)
    if math.prod(counts) > _MOST_BLOCKS:
        return
    for index in np.ndindex(*counts):
        block = [slice(None)]  # of all points
        for i, part in zip(index, shape, strict=True):
            block.append(slice(i * part, (i + 1) * part))
        yield residues[tuple(block)]


def multiply_residues(field: Field, residues: np.ndarray, ratio: Fraction) -> np.ndarray:
    """Residues that every value has, as of `take_residues`, times a constant."""
    p = int(field.residues.top_prime)
    factor = np.uint64(ratio.numerator * pow(ratio.denominator, -1, p) % p)
    return residues * factor % field.residues.top_prime


def list_ratios(axes: Mapping[str, int]) -> Iterator[tuple[Fraction, str]]:
    """Factors that a wrong program may have, and their words."""
    for name, n in axes.items():
        yield Fraction(n), f"{n} times, the size of {name!r},"
        yield Fraction(1, n), f"1/{n} of, by the size of {name!r},"
    yield Fraction(-1), "minus"
    for n in range(2, 65):
        yield Fraction(n), f"{n} times"
        yield Fraction(1, n), f"1/{n} of"
