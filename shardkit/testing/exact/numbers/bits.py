"""Floats as the integers of their bits, and back: a kernel that sends bits in place of floats is proved too.

Residues have no bits. The bits of a float are therefore a random word, and the field remembers the float of each word.

Worked example: a kernel sends x as `bits = bitcast(x, int32)`, by a ppermute, and the receiver takes `bitcast(bits,
float32)`. The word of x is w = hash(x), say 17; the ppermute moves 17; and 17 is remembered as the word of x, so that x
arrives as it was. Had the kernel sent `bits + 1`, the receiver would look up 18, which is no float's word: an unknown
float, which equals no other.
"""

from __future__ import annotations

import math

import numpy as np

from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.functions import apply_function
from shardkit.testing.exact.numbers.logarithms import to_number
from shardkit.testing.exact.numbers.values import INPUT, POISON, Exact, build_facts, list_columns


def to_bits(field: Field, x: Exact, dtype: str) -> Exact:
    """The words of floats of a dtype: random integers, of which `from_bits` gives the floats."""
    x = to_number(field, x)
    # The word is a random function of the residues alone: equal floats have equal bits.
    words = field.residues.hash(f"bits of {dtype}", x.number)
    remembered = field.laws.numbers_of_bits
    rows = zip(list_columns(x.number), list_columns(x.facts), list_columns(x.real), strict=True)
    for word, (residues, facts, real) in zip(list_columns(words), rows, strict=True):
        key = (dtype, word.tobytes())
        # NaN has the residues of 0.0, and so its word, which stays that of 0.0: the word of NaN itself has poison.
        if facts[POISON] and key in remembered:
            continue
        remembered[key] = residues, facts, real
    field.laws.degree_of_bits = field.laws.degree_of_bits.plus(x.degree)
    facts = build_facts(x.shape, used=x.used, poison=x.poison)
    real = np.full(x.real.shape, math.nan)
    return Exact(words, facts, real, degree=x.degree.of_function())


def from_bits(field: Field, x: Exact, dtype: str) -> Exact:
    """The floats of a dtype of these words; an integer that is the word of no such float gives an unknown float."""
    # Where no float is remembered, as for bits with a mask applied, the float is a random function of the integer.
    unknown = apply_function(field, "of bits", x)
    # Each with a column for each element; the columns of remembered floats are written.
    number = unknown.number.reshape(len(unknown.number), -1).copy()
    facts = unknown.facts.reshape(len(unknown.facts), -1).copy()
    real = unknown.real.reshape(len(unknown.real), -1).copy()
    remembered = field.laws.numbers_of_bits
    for place, word in enumerate(list_columns(x.number)):
        if facts[POISON, place]:  # bits of NaN arrive as NaN
            continue
        if not word.any():  # the bits of 0.0
            number[:, place] = 0
            facts[:, place] = 0
            real[:, place] = 0
            continue
        key = (dtype, word.tobytes())
        if key in remembered:
            number[:, place], facts[:, place], real[:, place] = remembered[key]
    return Exact(
        number.reshape(unknown.number.shape),
        facts.reshape(unknown.facts.shape),
        real.reshape(unknown.real.shape),
        degree=field.laws.degree_of_bits.plus(INPUT),
    )
