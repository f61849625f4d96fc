"""Functions of a matrix without a law, as its eigenvalues: random numbers that depend on all its elements.

Each matrix is hashed to one word for each component. Then each place of the result is hashed with that word.

Worked example: the eigenvalues of A = [[a, b], [b, c]], of which the lower triangle is a, b, c. The word of A is
w = mix(mix(a, place 0) + mix(b, place 1) + mix(c, place 2)), and the two eigenvalues are mix(w, place 0) and
mix(w, place 1), modulo the prime. Another program that computes the same A has the same eigenvalues.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardkit.testing.exact.numbers.assembly import where
from shardkit.testing.exact.numbers.elimination import find_poison, make_zero
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.hashing import mix
from shardkit.testing.exact.numbers.values import Exact, build_facts

_ROW = 2**20  # the distance of the places of two rows


def hash_elements(field: Field, name: str, elements: np.ndarray) -> np.ndarray:
    """uint64 [components, ...]: a random word of all elements [components, ..., n], each at its place."""
    salt = field.residues.salt(name)[:, None]
    # Without its place an element could stand elsewhere: A and its transpose would have one word.
    places = mix(salt, np.arange(elements.shape[-1], dtype=np.uint64))
    ones = (1,) * (elements.ndim - 2)
    places = places.reshape(len(elements), *ones, -1)
    hashes = mix(elements, places)
    return np.asarray(mix(hashes.sum(-1, np.uint64)))


def take_triangle(number: np.ndarray) -> np.ndarray:
    """[components, ..., n (n + 1) / 2]: the elements of the lower triangle in a row."""
    rows, columns = np.tril_indices(number.shape[-1])
    return number[..., rows, columns]


def apply_matrix_function(
    field: Field, name: str, a: Exact, word: np.ndarray, real: np.ndarray, sign: int = 0
) -> Exact:
    """Random numbers for a word of each matrix, one for every place of the shape of their real values.

    Args:
        field: the field.
        name: the name of the function; another name has other numbers.
        a: the matrices [..., m, n], whose used primes and poison the result has.
        word: the hash of each matrix, [components, ...].
        real: the real values, [1, ..., k] of vectors or [1, ..., k, l] of matrices.
        sign: the sign that is known of the results.
    """
    # The dims after those of the mesh and the batch: [k] or [k, l].
    lead = len(a.shape) - 2
    shape = real.shape[1 + lead :]
    ones = (1,) * len(shape)
    places = np.arange(shape[-1], dtype=np.uint64)
    if len(shape) == 2:
        rows = np.arange(shape[0], dtype=np.uint64)[:, None]
        places = places + np.uint64(_ROW) * rows
    # [components, k] or [components, k, l]: a random word for each place.
    salts = mix(field.residues.salt(name).reshape(-1, *ones), places)
    # With dims of size 1 in place of those of the mesh and the batch.
    salts = salts.reshape(len(salts), *(1,) * lead, *shape)
    number = mix(word.reshape(*word.shape, *ones), salts)
    number = number % field.residues.primes_of(number)
    # What is known of a matrix is known of each element of its result.
    used = a.used.max((-2, -1))
    poison = find_poison(field, a)
    used = used.reshape(*used.shape, *ones)
    poison = poison.reshape(*poison.shape, *ones)
    facts = build_facts(number.shape[1:], sign, 0, used, poison=poison)
    return field.settle(Exact(number, facts, real, degree=a.degree.of_function()))


def fill_zeros(field: Field, x: Exact, is_zero: np.ndarray) -> Exact:
    """Zero where the mask holds and x is a number."""
    return where(is_zero & (x.poison == 0), make_zero(field, x), x)


def apply_real_function(
    function: Callable[[np.ndarray], Any], a: Exact, shapes: Sequence[tuple[int, ...]]
) -> list[np.ndarray]:
    """What numpy computes of real matrices, [1, ..., *shape] each; NaN where they are no numbers."""
    x = a.real[0]
    is_finite = np.isfinite(x).all((-2, -1))
    try:
        arrays = function(np.where(is_finite[..., None, None], x, 0.0))
    except np.linalg.LinAlgError:
        # numpy refuses all matrices where one has no eigenvalues: then none has known real values.
        arrays = [np.full((*x.shape[:-2], *shape), math.nan) for shape in shapes]
    results = []
    for array in arrays:
        y = np.asarray(array)
        ones = (1,) * (y.ndim - is_finite.ndim)
        mask = is_finite.reshape(*is_finite.shape, *ones)
        results.append(np.where(mask, y, math.nan)[None])
    return results
