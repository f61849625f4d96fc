"""Linear algebra of small matrices in the field: exact where it is rational, else uninterpreted, with some laws.

- Triangular solves and LU are sums, products and quotients (`elimination.py`).
- Cholesky's factor of A = U D U^T, where U has ones on its diagonal, is L = U sqrt(D). U and D are rational, and of a
  root the field knows its square. So the squared diagonal of L, and the factor of a leading block, are exact. Products
  of different roots do not cancel in residues. The field remembers instead to which A a factor belongs: L L^T is A, and
  L^-T (L^-1 b) is A^-1 b (`grams.py`).
- R of QR is the transposed Cholesky factor of A^T A but for signs, which are those of the real R, so LAPACK's; Q is
  A R^-1. The field remembers that Q^T Q is I, and R^T R is A^T A. The R of stacked factors, [R1; R2] of two devices, is
  therefore the R of all rows: the product of [R1; R2] with itself is the sum of those that are remembered of R1 and R2.
- Eigenvalues, singular values and vectors are uninterpreted functions of all elements that jax reads
  (`matrix_functions.py`). A matrix [n, n] of rank r in the field has n - r eigenvalues that are zero.

Worked example: A = [[4, 2], [2, 5]] has D = (4, 4) and U = [[1, 0], [1/2, 1]]; its factor is [[r, 0], [r/2, r]], where
r is a random number of which the field knows that its square is 4.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from shardkit.testing.exact.numbers.arithmetic import matmul, negate
from shardkit.testing.exact.numbers.assembly import join_exact, where
from shardkit.testing.exact.numbers.elimination import (
    eliminate,
    factor_positive,
    find_rank,
    make_zero,
    solve,
    substitute,
    take_block,
    transpose,
)
from shardkit.testing.exact.numbers.errors import UnsupportedError
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.grams import complete_solution, keep_product, multiply_with_itself
from shardkit.testing.exact.numbers.logarithms import to_number
from shardkit.testing.exact.numbers.matrix_functions import (
    apply_matrix_function,
    apply_real_function,
    fill_zeros,
    hash_elements,
    take_triangle,
)
from shardkit.testing.exact.numbers.orders import find_keys
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.rules.operands import Operand
from shardkit.testing.exact.rules.scope import Scope

# Factorizations that need more than sums, products and quotients.
FACTORS = {"cholesky", "qr", "eigh", "svd"}


# Systems of equations


def solve_triangular(scope: Scope, equation: Any, a: Operand, b: Operand) -> Exact:
    """triangular_solve, by substitution."""
    params = equation.params
    field = scope.field
    a, b = scope.lift(a, b)
    lower = params["lower"]
    transposed = params["transpose_a"]
    if not params["left_side"]:  # x a = b is a^T x^T = b^T
        b = transpose(b)
        transposed = not transposed
    if transposed:
        a = transpose(a)
        lower = not lower
    x = substitute(field, a, b, lower, params["unit_diagonal"])
    # The diagonal of a factor of Cholesky's has random roots, which do not cancel: the field remembers x itself.
    if field.laws.grams and not params["unit_diagonal"]:
        x = complete_solution(field, a, b, x, lower)
    if not params["left_side"]:
        return transpose(x)
    return x


def solve_tridiagonal(
    scope: Scope, equation: Any, lower: Operand, diagonal: Operand, upper: Operand, b: Operand
) -> Exact:
    """tridiagonal_solve, by elimination of the matrix [n, n] that has the three bands, and zeros elsewhere."""
    field = scope.field
    bands = scope.lift(lower, diagonal, upper)
    dims = len(bands[0].shape)
    n = bands[0].shape[-1]
    ones = (1,) * (dims - 1)
    a = field.lift(np.zeros((*ones, n, n), np.float32))
    # Row i has element i of each band: before, at and after the diagonal.
    for band, offset in zip(bands, (-1, 0, 1), strict=True):
        column = to_number(field, band).move(lambda part: part[..., :, None])
        is_in_band = np.eye(n, k=offset, dtype=bool)
        a = where(is_in_band, column, a)
    return solve(field, a, scope.lift_one(b))


# Factorizations


def factor_lu(scope: Scope, equation: Any, a: Exact) -> list[Any]:
    """lu: the factors in one matrix, the rows that were swapped, and the order of all rows."""
    field = scope.field
    lu, swaps, order = eliminate(field, to_number(field, a))
    return [lu, field.marks.add(swaps, natural=True), field.marks.add(order, natural=True)]


def factor_cholesky(scope: Scope, equation: Any, a: Exact) -> Exact:
    """cholesky: the lower factor, of the lower triangle."""
    field = scope.field
    field.notes.uninterpreted.add("cholesky")
    a = _mirror_triangle(to_number(field, a), lower=True)
    # From here on the product of the factor with its transpose is a, in every place that computes it.
    factor = factor_positive(field, a)
    keep_product(field, transpose(factor), a)
    return factor


def factor_qr(scope: Scope, equation: Any, a: Exact) -> list[Any]:
    """qr, of wide matrices too.

    Worked example: A = [[3], [4]]. A^T A is 25, and its Cholesky factor is r, a random number whose square is 25. The
    real R is -5 by LAPACK, so that R is -r here, and Q is A / -r.
    """
    field = scope.field
    params = equation.params
    a = to_number(field, a)
    m, n = a.shape[-2:]
    if params["pivoting"]:
        raise UnsupportedError("qr with pivoting, whose order of columns follows from floats,")
    if params["full_matrices"] and m > n:
        raise UnsupportedError("qr with full_matrices or mode='complete', whose last columns are any basis,")
    field.notes.uninterpreted.add("qr")
    columns = min(m, n)
    real_q, real_r = apply_real_function(np.linalg.qr, a, [(m, columns), (columns, n)])

    # The columns on the left, at most as many as rows. For them R^T R = A^T A gives R but for the signs of its rows.
    left = take_block(a, slice(None), slice(0, m))
    squares = multiply_with_itself(field, left)
    lower = factor_positive(field, squares)
    upper = transpose(lower)
    # Q = A R^-1 is the transposed solution of R^T Q^T = A^T.
    q = transpose(substitute(field, lower, transpose(left), lower=True, unit=False))
    # A negative sign on the diagonal of R negates a row of R, and the column of Q that it is multiplied with.
    real_diagonal = np.diagonal(real_r, axis1=-2, axis2=-1)
    is_positive = _find_signs(scope, equation, left, real_diagonal)
    q = where(is_positive[..., None, :], q, negate(field, q))
    r = where(is_positive[..., :, None], upper, negate(field, upper))
    if n > m:  # the other columns of R are Q^-1 A = R left^-1 A
        right = take_block(a, slice(None), slice(m, n))
        other_columns = matmul(field, r, solve(field, left, right))
        r = join_exact([r, other_columns], len(r.shape) - 1, new=False)
    q = field.settle(replace(q, real=real_q))
    r = field.settle(replace(r, real=real_r))
    if n <= m:
        _keep_qr(field, q, r, upper, squares)
    return [q, r]


def _keep_qr(field: Field, q: Exact, r: Exact, upper: Exact, squares: Exact) -> None:
    """Keeps that R^T R is A^T A, with any signs of R, and that Q^T Q is I: Q Q^T too if Q is square."""
    m, n = q.shape[-2:]
    keep_product(field, upper, squares)
    keep_product(field, r, squares)
    identity = field.lift(np.broadcast_to(np.eye(n, dtype=np.float32), squares.shape))
    keep_product(field, q, identity)
    if m == n:
        keep_product(field, transpose(q), identity)


def _find_signs(scope: Scope, equation: Any, a: Exact, diagonal: np.ndarray) -> np.ndarray:
    """Whether each element of R's diagonal is positive: a comparison of a random function of all of A with zero."""
    field = scope.field
    word = hash_elements(field, "signs of qr", _flatten_matrices(a))
    x = apply_matrix_function(field, "sign of qr", a, word, diagonal)
    return scope.decide(equation, find_keys(field, x) >= 0, x, make_zero(field, x))


# Eigenvalues and singular values


def factor_symmetric(scope: Scope, equation: Any, a: Exact) -> list[Any]:
    """eigh: vectors, then values."""
    n = a.shape[-1]
    if equation.params.get("subset_by_index") not in (None, (0, n)):
        raise UnsupportedError("eigh with subset_by_index")
    field = scope.field
    field.notes.uninterpreted.add("eigh")
    lower = equation.params["lower"]
    if lower:
        triangle = "L"
    else:
        triangle = "U"
    a = _mirror_triangle(to_number(field, a), lower)
    values, vectors = apply_real_function(partial(np.linalg.eigh, UPLO=triangle), a, [(n,), (n, n)])
    # Both triangles are equal now: one of them says all.
    word = hash_elements(field, "eigh", take_triangle(a.number))
    # As many eigenvalues as the rank lacks are zero: those that are the smallest in real numbers. Worked example, of a
    # matrix [3, 3] of rank 2 with the real eigenvalues [-3, 1e-16, 2]: in the order of their sizes they are the numbers
    # [1, 2, 0], so their places in that order are [2, 0, 1]. One eigenvalue is zero: that with the place 0, number 1.
    nearest_to_zero = np.argsort(np.abs(values[0]), -1, kind="stable")
    is_zero = np.argsort(nearest_to_zero, -1) < n - find_rank(field, a)[..., None]
    w = apply_matrix_function(field, "eigenvalues", a, word, values)
    w = fill_zeros(field, w, is_zero)
    # LAPACK's signs of the vectors depend on the triangle that it reads.
    v = apply_matrix_function(field, f"eigenvectors {triangle}", a, word, vectors)
    return [v, w]


def factor_singular(scope: Scope, equation: Any, a: Exact) -> list[Any]:
    """svd: values, and vectors of both sides."""
    params = equation.params
    m, n = a.shape[-2:]
    least = min(m, n)
    if params.get("subset_by_index") not in (None, (0, least)):
        raise UnsupportedError("svd with subset_by_index")
    field = scope.field
    field.notes.uninterpreted.add("svd")
    a = to_number(field, a)
    left = (m, least)
    right = (least, n)
    full = params["full_matrices"] and params["compute_uv"]
    if full:
        left = (m, m)
        right = (n, n)

    def compute_svd(x: np.ndarray) -> Any:
        u, s, vt = np.linalg.svd(x, full_matrices=full)
        return s, u, vt

    real_s, real_u, real_vt = apply_real_function(compute_svd, a, [(least,), left, right])
    # All results are random functions of one word, which depends on every element of A: equal matrices have equal ones.
    word = hash_elements(field, "svd", _flatten_matrices(a))
    s = apply_matrix_function(field, "singular values", a, word, real_s, sign=1)
    # The values descend, so that those behind the rank are zero: of a [3, 3] of rank 2 the last one.
    is_zero = np.arange(least) >= find_rank(field, a)[..., None]
    s = fill_zeros(field, s, is_zero)
    if not params["compute_uv"]:
        return [s]
    u = apply_matrix_function(field, "left singular vectors", a, word, real_u)
    vt = apply_matrix_function(field, "right singular vectors", a, word, real_vt)
    return [s, u, vt]


def _mirror_triangle(a: Exact, lower: bool) -> Exact:
    """The symmetric matrix of which one triangle is read."""
    is_read = np.tri(a.shape[-1], dtype=bool)
    if not lower:
        is_read = is_read.T
    return where(is_read, a, transpose(a))


def _flatten_matrices(a: Exact) -> np.ndarray:
    """[components, ..., m n]: the residues of each matrix in a row."""
    return a.number.reshape(*a.number.shape[:-2], -1)
