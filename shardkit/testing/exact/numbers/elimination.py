"""Elimination with matrices of the field: substitution, LU, solutions, Cholesky's factor, rank.

Elimination has only sums, products and quotients, and so is exact, but for the roots on the diagonal of Cholesky's
factor. The pivots of LU are chosen by the real values, as LAPACK chooses them; a solution does not depend on them.

Matrices are the last two dims of arrays; the dims in front are of a mesh and of a batch.

Degrees are not counted along the loops, where they would double in each step. The elements of an inverse or of a
solution are quotients of determinants (Cramer): a determinant of n rows has degree n, and the divisor is one
determinant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shardkit.testing.exact.numbers.arithmetic import invert, matmul, multiply, subtract
from shardkit.testing.exact.numbers.assembly import join_exact, where
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.logarithms import to_number
from shardkit.testing.exact.numbers.orders import find_keys
from shardkit.testing.exact.numbers.square_roots import square_root
from shardkit.testing.exact.numbers.tower import invert_by_power
from shardkit.testing.exact.numbers.values import CONSTANT, INPUT, OUTSIDE, POISON, Degree, Exact


def substitute(field: Field, a: Exact, b: Exact, lower: bool, unit: bool) -> Exact:
    """x of a x = b, for a triangular [..., n, n] and [..., n, k]; `unit` reads ones on the diagonal.

    Worked example: of [[2, 0], [3, 4]] x = [6, 1] row 0 is 6 / 2 = 3, and row 1 is (1 - 3 * 3) / 4 = -2.
    """
    a = to_number(field, a)
    b = to_number(field, b)
    n = a.shape[-1]
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    b = broadcast_matrices(b, lead)
    # An empty system: b has no rows either.
    if not n:
        return b
    # All inverses of the diagonal at once, which is the price of one.
    inverses = None
    if not unit:
        inverses = _invert_diagonal(field, a)
    rows: dict[int, Exact] = {}
    numbers = range(n) if lower else range(n - 1, -1, -1)
    for i in numbers:
        this_row = slice(i, i + 1)
        row = take_block(b, this_row, slice(None))
        if rows:
            # x_i is b_i less a_ij x_j for all rows j that are ready: those above it, or below it.
            ready = slice(0, i) if lower else slice(i + 1, n)
            coefficients = take_block(a, this_row, ready)
            row = subtract(field, row, matmul(field, coefficients, _stack_rows(rows)))
        # Over the diagonal, by its inverse: [..., 1, 1] times [..., 1, k].
        if inverses is not None:
            row = multiply(field, row, take_block(inverses, this_row, slice(None)))
        rows[i] = row
    return replace(_stack_rows(rows), degree=_degree_of_solution(field, a, b))


def _stack_rows(rows: dict[int, Exact]) -> Exact:
    """Rows [..., 1, k] by their numbers as one matrix."""
    ordered = [rows[i] for i in sorted(rows)]
    return join_exact(ordered, len(ordered[0].shape) - 2, new=False)


def eliminate(field: Field, a: Exact) -> tuple[Exact, np.ndarray, np.ndarray]:
    """LU in one matrix, with the row that was swapped in each step, and the order of all rows.

    Worked example: the largest first element of [[1, 2], [4, 6]] is in row 1. So rows 0 and 1 are swapped, the
    swaps are [1, 1], the order is [1, 0], and the matrix becomes [[4, 6], [1/4, 1/2]]: below the diagonal is L, on
    and above it U.
    """
    m, n = a.shape[-2:]
    lead = a.shape[:-2]
    row_numbers = np.arange(m, dtype=np.int32)
    # x becomes U on and above the diagonal, and L below it, one column in each step.
    steps = min(m, n)
    # LAPACK reports both: which row each step swapped, and where all rows ended.
    swaps = np.zeros((*lead, steps), np.int32)
    order = np.broadcast_to(row_numbers, (*lead, m)).copy()
    x = a
    for k in range(steps):
        # The pivot is the largest element, in real numbers, of the rows that no pivot is in: [..., m].
        column = take_block(x, slice(None), slice(k, k + 1))
        sizes = np.abs(find_keys(field, column))[..., 0]
        sizes = np.where(row_numbers < k, -1.0, sizes)
        largest = sizes.argmax(-1)
        swaps[..., k] = largest
        # Rows k and largest change places: in the order 0, 1, ..., m - 1 these two are exchanged.
        places = np.broadcast_to(row_numbers, (*lead, m)).copy()
        np.put_along_axis(places, largest[..., None], k, -1)
        places[..., k] = largest
        order = np.take_along_axis(order, places, -1)
        x = _reorder_rows(x, places)
        pivot = take_block(x, slice(k, k + 1), slice(k, k + 1))
        # Below a pivot that is zero all is zero, and stays so.
        divisor = where(field.is_zero(pivot), _make_one(field, pivot), pivot)
        x = _eliminate_column(field, x, k, divisor)
    degree = degree_over_determinants(field, a, steps, steps).times(a.degree.to_the(steps))
    return replace(x, degree=degree), swaps, order


def _eliminate_column(field: Field, x: Exact, k: int, pivot: Exact) -> Exact:
    """One step: the column below the pivot over the pivot, and what is behind both less column times row.

    Worked example, with the pivot 2 of [[2, 4], [6, 9]]: the column below it becomes 6 / 2 = 3, and the 9 becomes
    9 - 3 * 4 = -3.
    """
    m, n = x.shape[-2:]
    rows = np.arange(m)[:, None]
    columns = np.arange(n)
    # column [..., m, 1] and the pivot's row [..., 1, n] make a product of all rows and columns, of which those behind
    # the pivot are used.
    column = take_block(x, slice(None), slice(k, k + 1))
    column = multiply(field, column, invert(field, pivot))
    row = take_block(x, slice(k, k + 1), slice(None))
    product = multiply(field, column, row)
    x = where((rows > k) & (columns > k), subtract(field, x, product), x)
    return where((rows > k) & (columns == k), column, x)


def solve(field: Field, a: Exact, b: Exact) -> Exact:
    """x of a x = b, for any a [..., n, n] and [..., n, k]."""
    lu, _, order = eliminate(field, a)
    b = to_number(field, b)
    # A x = b is L U x = P b, where P reorders the rows: first L y = P b, then U x = y.
    x = substitute(field, lu, _reorder_rows(b, order), lower=True, unit=True)
    x = substitute(field, lu, x, lower=False, unit=False)
    return replace(x, degree=_degree_of_solution(field, a, b))


def factor_positive(field: Field, a: Exact) -> Exact:
    """Cholesky's lower factor of a symmetric matrix; outside of its domain where that is not positive definite.

    Elimination without swaps makes A = U D U^T, with the pivots D. The factor is U sqrt(D).
    """
    n = a.shape[-1]
    if not n:
        return a
    x = a
    pivots = []
    # [...], one for each matrix: a singular matrix is outside of the domain, as -1 is outside of the domain of sqrt.
    is_singular = np.zeros(a.shape[:-2], bool)
    for k in range(n):
        pivot = take_block(x, slice(k, k + 1), slice(k, k + 1))
        # A pivot that is not positive has no real root. A 1 in its place keeps the steps going; the result is poison.
        # In an order only a pivot of zero is singular: no sign is drawn there.
        has_no_root = field.is_zero(pivot)
        if field.settings.order is None:
            has_no_root = has_no_root | (pivot.real[0] <= 0)
        is_singular = is_singular | has_no_root[..., 0, 0]
        pivot = where(has_no_root, _make_one(field, pivot), pivot).as_positive()
        pivots.append(pivot)
        x = _eliminate_column(field, x, k, pivot)
    rows = np.arange(n)[:, None]
    columns = np.arange(n)
    x = where(rows == columns, _make_one(field, x), x)
    x = where(rows < columns, make_zero(field, x), x)
    # [..., 1, n]: column j of U is multiplied by the root of pivot j.
    diagonal = join_exact(pivots, len(x.shape) - 1, new=False)
    x = multiply(field, x, square_root(field, diagonal))
    poison = np.maximum(np.where(is_singular, OUTSIDE, 0), find_poison(field, a))
    degree = degree_over_determinants(field, a, n, n).times(a.degree.to_the(n)).times(INPUT)
    facts = x.facts.copy()
    facts[POISON] = np.maximum(facts[POISON], poison[..., None, None])
    return field.settle(replace(x, facts=facts, degree=degree))


def find_rank(field: Field, a: Exact) -> np.ndarray:
    """int [...]: the rank of each matrix [..., m, n], the highest at any point.

    By elimination of residues alone, without facts: of the rows that have no pivot yet, the first whose number in a
    column is not zero has the pivot of that column. A component without meaning has rank 0.

    Worked example, [[2, 4], [1, 2]] modulo 7. In column 0 the pivot is the 2 of row 0. 1 / 2 is 4, so that row 1 less 4
    times row 0 is [1 - 8, 2 - 16] = [0, 0]. In column 1 the free row 1 has a zero: there is no pivot. The rank is 1.
    """
    x = a.number
    p = field.residues.primes_of(x)
    m, n = a.shape[-2:]
    row_numbers = np.arange(m)[:, None]
    is_free = np.ones((*x.shape[:-2], m, 1), bool)  # rows that no pivot is in
    for k in range(n):
        # [components, ..., m, 1]
        column = np.where(is_free, x[..., k : k + 1], np.uint64(0))
        place = (column != 0).argmax(-2)[..., None]
        pivot = np.take_along_axis(column, place, -2)
        row = np.take_along_axis(x, place, -2)
        factors = column * invert_by_power(pivot, p) % p
        has_pivot = pivot != 0
        is_free = is_free & ~(has_pivot & (row_numbers == place))
        # p is added so that the difference of unsigned words is not negative.
        reduced = (x + p - factors * row % p) % p
        x = np.where(is_free & has_pivot, reduced, x)
    # [components, ...]; by chance a component may have a lower rank, and none a higher one.
    ranks = (~is_free).sum((-2, -1))
    valid = field.valid(a.used.max((-2, -1), initial=0))
    return np.asarray(np.where(valid, ranks, 0).max(0))


# Degrees and poison


def _degree_of_solution(field: Field, a: Exact, b: Exact) -> Degree:
    """A determinant of n - 1 rows of a and one of b, over one of n rows of a."""
    n = a.shape[-1]
    inverses = degree_over_determinants(field, a, n, 1)
    return inverses.times(a.degree.to_the(n - 1)).times(b.degree)


def degree_over_determinants(field: Field, a: Exact, n: int, count: int) -> Degree:
    """The degree of the inverses of `count` determinants of each matrix, with at most n rows each."""
    if not a.degree.total:
        return CONSTANT
    matrices = math.prod(a.shape[:-2])
    return field.degree_of_inverses(a.degree.to_the(n), count * matrices)


def find_poison(field: Field, a: Exact) -> np.ndarray:
    """int [...]: the poison that each matrix has from its elements."""
    is_infinite = a.is_truly_infinite.any((-2, -1))
    poison = a.poison.max((-2, -1), initial=0)
    return np.maximum(poison, np.where(is_infinite, field.undefined, 0))


# Parts of matrices


def transpose(a: Exact) -> Exact:
    """[..., n, m]."""
    return a.move(lambda part: part.swapaxes(-1, -2))


def take_block(a: Exact, rows: slice, columns: slice) -> Exact:
    """Some rows and columns of each matrix."""
    return a.move(lambda part: part[..., rows, columns])


def broadcast_matrices(a: Exact, lead: Sequence[int]) -> Exact:
    """Matrices with these dims in front."""
    return a.move(lambda part: np.broadcast_to(part, (len(part), *lead, *part.shape[-2:])))


def make_zero(field: Field, like: Exact) -> Exact:
    """Zero with as many dims as another array."""
    return field.lift(np.zeros((1,) * len(like.shape), np.float32))


def _make_one(field: Field, like: Exact) -> Exact:
    return field.lift(np.ones((1,) * len(like.shape), np.float32))


def _invert_diagonal(field: Field, a: Exact) -> Exact:
    """[..., n, 1]."""
    diagonal = a.move(lambda part: np.diagonal(part, axis1=-2, axis2=-1)[..., None])
    return invert(field, diagonal)


def _reorder_rows(a: Exact, order: np.ndarray) -> Exact:
    """Matrices [..., m, n] with their rows in another order [..., m]."""
    lead = np.broadcast_shapes(a.shape[:-2], order.shape[:-1])
    places = np.broadcast_to(order, (*lead, order.shape[-1]))[None, ..., None]
    return broadcast_matrices(a, lead).move(lambda part: np.take_along_axis(part, places, -2))
