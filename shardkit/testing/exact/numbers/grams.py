"""Products that factors of matrices have by their definition, and that their residues do not show.

The factor L of A has random numbers for its roots. So L L^T, computed from them, is not A; only the square of one root
alone is known. The field therefore keeps the product of each matrix that a factorization returns with itself: A for
L^T, the identity for Q. When a program multiplies such a matrix with itself, the kept product is the result.

Worked example, the distributed QR that stacks factors (TSQR). Two devices have the rows A1 and A2, and compute R1 and
R2; one of them computes the R of [R1; R2]. The product of [R1; R2] with itself is R1^T R1 + R2^T R2, which is kept as
A1^T A1 + A2^T A2. That is A^T A, so that the R of [R1; R2] is the R of A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from shardkit.testing.exact.numbers.arithmetic import matmul
from shardkit.testing.exact.numbers.assembly import where
from shardkit.testing.exact.numbers.elimination import broadcast_matrices, make_zero, solve, transpose
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.logarithms import to_number
from shardkit.testing.exact.numbers.values import SIGN, Degree, Exact


def multiply_with_itself(field: Field, a: Exact) -> Exact:
    """A^T A of A [..., m, n]: the products that are kept for blocks of its rows, plus the product of the other rows."""
    product = matmul(field, transpose(a), a)
    n = a.shape[-1]
    facts = product.facts.copy()
    # The diagonal has sums of squares. This einsum is a view of it, so that the facts themselves are written.
    np.einsum("...ii->...i", facts[SIGN])[...] = 1
    number = product.number
    degree = product.degree
    # How many rows a kept block may have: A = [R1; R2] with R1 and R2 of 3 rows each has two blocks of height 3.
    heights = sorted({height for height, width, _ in field.laws.grams if width == n}, reverse=True)
    if heights:
        number = number.copy()
        masked = _mask_used(field, a)
        p = field.residues.moduli[:, None, None]
        for place in np.ndindex(*a.shape[:-2]):
            matrix = (slice(None), *place)
            blocks, other_rows = _find_kept_blocks(field, masked[matrix], heights)
            if not blocks:
                continue
            # A^T A is a sum over blocks of rows: the products that are kept for some, and that of the other rows.
            rows = a.number[matrix][:, other_rows]
            total = _multiply_residues(field, rows.swapaxes(1, 2), rows)
            for block in blocks:
                total = (total + block.squares) % p
                degree = degree.plus(block.degree)
            number[matrix] = total
    return field.settle(Exact(number, facts, product.real, degree=degree))


def find_product(field: Field, x: Exact, y: Exact) -> Exact | None:
    """x y of matrices where x is the transposed y, and something is kept of the products of its rows."""
    if not field.laws.grams or x.factor is not None or y.factor is not None:
        return None
    transposed = transpose(y)
    if x.number.shape != transposed.number.shape or not np.array_equal(x.number, transposed.number):
        return None
    # NaN has the residues of 0: a factor of which zeros became NaN is not that factor.
    if not np.array_equal(x.poison, transposed.poison):
        return None
    return multiply_with_itself(field, y)


def keep_product(field: Field, a: Exact, squares: Exact) -> None:
    """Keeps A^T A for each matrix [..., m, n]."""
    masked = _mask_used(field, a)
    m, n = a.shape[-2:]
    for place in np.ndindex(*a.shape[:-2]):
        if a.poison[place].any():
            continue
        matrix = (slice(None), *place)
        key = (m, n, masked[matrix].tobytes())
        field.laws.grams[key] = squares.number[matrix], squares.degree


def complete_solution(field: Field, a: Exact, b: Exact, x: Exact, lower: bool) -> Exact:
    """x of a x = b, where a is a factor L or L^T of a matrix A that is kept; another x as it is.

    A program solves A x = b in two steps: y of L y = b, then x of L^T x = y. The roots of L do not cancel in residues.
    So at the first step the field solves A x = b itself, and keeps x for the second. The product of y with itself is
    b^T A^-1 b, which is kept too.

    Worked example: A = [[5]] has the factor L = [[h]], where h is drawn. Of b = 3 the first step is y = 3 / h, and the
    second one y / h = 3 / h**2, which is not 3 / 5 in residues. So 3 / 5 is kept for h and y, and is the result.
    """
    n = a.shape[-1]
    if x.special or not n:
        return x
    # A logarithm is kept beside the residues, by which factors and halves are found: L + log(w) is not L.
    a = broadcast_matrices(to_number(field, a), x.shape[:-2])
    # Of Q of a QR, with Q Q^T = I, one triangle is solved for, and that is a factor of another matrix.
    is_read = np.tri(n, dtype=bool) if lower else np.tri(n, dtype=bool).T
    a = where(is_read, a, make_zero(field, a))
    b = broadcast_matrices(to_number(field, b), x.shape[:-2])
    # Factors are kept as L^T, of which the product with itself is L L^T = A.
    upper = transpose(a) if lower else a
    factors = _mask_used(field, upper)
    kept = []
    for place in np.ndindex(*x.shape[:-2]):
        matrix = (slice(None), *place)
        product = field.laws.grams.get((n, n, factors[matrix].tobytes()))
        if product is None:
            return x
        kept.append((matrix, *product))
    # y = L^-1 b is the result of the first step, and what the second one is given.
    halves = _mask_used(field, x if lower else b)
    if not lower:
        return _take_halves(field, factors, halves, x)
    # A itself: with the facts and real values of the product, and the residues that are kept.
    squares = matmul(field, a, upper)
    degree = squares.degree
    for matrix, number, degree_of_product in kept:
        squares.number[matrix] = number
        degree = degree.plus(degree_of_product)
    solution = solve(field, replace(squares, degree=degree, roots=None), b)
    # y^T y = b^T A^-1 b, as a log-likelihood has it.
    keep_product(field, x, matmul(field, transpose(b), solution))
    _keep_halves(field, factors, halves, solution)
    return x


def _keep_halves(field: Field, factors: np.ndarray, halves: np.ndarray, solution: Exact) -> None:
    """Keeps A^-1 b for the factor of A and L^-1 b, column by column."""
    for place in np.ndindex(*solution.shape[:-2]):
        matrix = (slice(None), *place)
        factor = factors[matrix].tobytes()
        for column in range(solution.shape[-1]):
            key = (factor, halves[matrix][..., column].tobytes())
            field.laws.halves[key] = solution.number[matrix][..., column], solution.degree


def _take_halves(field: Field, factors: np.ndarray, halves: np.ndarray, x: Exact) -> Exact:
    """L^-T of columns, of which A^-1 b is kept."""
    number = x.number.copy()
    degree = x.degree
    for place in np.ndindex(*x.shape[:-2]):
        matrix = (slice(None), *place)
        factor = factors[matrix].tobytes()
        for column in range(x.shape[-1]):
            key = (factor, halves[matrix][..., column].tobytes())
            if key in field.laws.halves:
                solution, degree_of_solution = field.laws.halves[key]
                number[(*matrix, slice(None), column)] = solution
                degree = degree.plus(degree_of_solution)
    return replace(x, number=number, degree=degree, roots=None)


def _multiply_residues(field: Field, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """[components, m, k] @ [components, k, n], where k may be none."""
    p = field.residues.moduli[:, None, None]
    total = np.zeros((len(x), x.shape[1], y.shape[2]), np.uint64)
    for i in range(x.shape[2]):
        column = x[:, :, i : i + 1]
        row = y[:, i : i + 1]
        total = (total + column * row % p) % p
    return total


class _Block(NamedTuple):
    """A block of rows of which the product with itself is kept.

    Attributes:
        height: how many rows it has.
        squares: uint64 [components, n, n], the product.
        degree: its degree.
    """

    height: int
    squares: np.ndarray
    degree: Degree


def _find_kept_blocks(field: Field, a: np.ndarray, heights: Sequence[int]) -> tuple[list[_Block], list[int]]:
    """The kept blocks of rows of [components, m, n], and the numbers of the other rows; the highest blocks first."""
    blocks: list[_Block] = []
    other_rows: list[int] = []
    m = a.shape[1]
    # From the top row down; a kept block that begins at a row is taken, else the row is one of the others.
    row = 0
    while row < m:
        block = _find_kept_block(field, a[:, row:], heights)
        if block is None:
            other_rows.append(row)
            row += 1
        else:
            blocks.append(block)
            row += block.height
    return blocks, other_rows


def _find_kept_block(field: Field, a: np.ndarray, heights: Sequence[int]) -> _Block | None:
    """The first kept block with which [components, m, n] begins; None if none is."""
    m, n = a.shape[1:]
    for height in heights:
        if height > m:
            continue
        product = field.laws.grams.get((height, n, a[:, :height].tobytes()))
        if product is not None:
            return _Block(height, *product)
    return None


def _mask_used(field: Field, a: Exact) -> np.ndarray:
    """The numbers of matrices, zero in the components that have no meaning: by these bytes they are kept."""
    used = a.used.max((-2, -1), initial=0)
    has_meaning = field.residues.levels_of_components(used.ndim) >= used
    return np.where(has_meaning[..., None, None], a.number, np.uint64(0))
