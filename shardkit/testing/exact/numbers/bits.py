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
from shardkit.testing.exact.numbers.functions import apply_function, list_columns
from shardkit.testing.exact.numbers.logarithms import to_number
from shardkit.testing.exact.numbers.values import INPUT, POISON, Exact, build_facts


def to_bits(field: Field, x: Exact, dtype: str) -> Exact:
    """The words of floats of a dtype: random integers, of which `from_bits` gives the floats."""
    x = to_number(field, x)
    words = field.residues.hash(f"bits of {dtype}", x.number)
    # The word is a random function of the residues alone: equal floats have equal bits.
    remembered = field.laws.numbers_of_bits
    columns = zip(*(list_columns(part) for part in (words, x.number, x.facts, x.real)), strict=True)
    for word, residues, facts, real in columns:
        key = (dtype, word.tobytes())
        # NaN has the residues of 0.0, and so its word, which is that of 0.0: the word of NaN itself has poison.
        if facts[POISON] and key in remembered:
            continue
        remembered[key] = residues, facts, real
    field.laws.degree_of_bits = field.laws.degree_of_bits.plus(x.degree)
    facts = build_facts(x.shape, used=x.used, poison=x.poison)
    return Exact(words, facts, np.full(x.real.shape, math.nan), degree=x.degree.of_function())


def from_bits(field: Field, x: Exact, dtype: str) -> Exact:
    """The floats of a dtype of these words; an integer that is the word of no such float gives an unknown float."""
    # Where no float is remembered, as for bits with a mask applied, the float is a random function of the integer.
    unknown = apply_function(field, "of bits", x)
    number = unknown.number.reshape(len(unknown.number), -1).copy()
    facts = unknown.facts.reshape(len(unknown.facts), -1).copy()
    real = unknown.real.reshape(len(unknown.real), -1).copy()
    for i, word in enumerate(list_columns(x.number)):
        if facts[POISON, i]:  # bits of NaN arrive as NaN
            continue
        if not word.any():  # the bits of 0.0
            number[:, i] = 0
            facts[:, i] = 0
            real[:, i] = 0
        elif (dtype, word.tobytes()) in field.laws.numbers_of_bits:
            number[:, i], facts[:, i], real[:, i] = field.laws.numbers_of_bits[dtype, word.tobytes()]
    shape = unknown.shape
    degree = field.laws.degree_of_bits.plus(INPUT)
    return Exact(number.reshape(-1, *shape), facts.reshape(-1, *shape), real.reshape(-1, *shape), degree=degree)
