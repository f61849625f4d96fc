"""Linear algebra of small matrices in the field: exact where it is rational, else uninterpreted with what is known.

- Triangular solves and LU are sums, products and quotients. The pivots are those of the real values, as LAPACK chooses
  them; what is solved does not depend on them.
- Cholesky's factor of A = U D U^T, U with ones on its diagonal, is L = U sqrt(D): U and D are rational, and the
  square of a root is known. So the diagonal squared, and the factor of a leading part, are exact. Products of roots
  with others are not known to cancel, but the field keeps of which A this is the factor: L L^T is A, and L^-T of
  L^-1 b is A^-1 b.
- R of QR is the transposed Cholesky factor of A^T A but for signs, which are those of the real R, so LAPACK's; Q is
  A R^-1. So Q R = A, and Q^T Q = I is kept too. The product with itself of what is made of such matrices by rows, as
  the R of all devices are, is the sum of what is kept: so the R of these R is that of the whole.
- Eigenvalues, singular values and vectors are uninterpreted functions of all elements that jax reads. As many are zero
  as the rank of the matrix in the field says.

Worked example: A = [[4, 2], [2, 5]] has D = (4, 4) and U = [[1, 0], [1/2, 1]]; its factor is [[r, 0], [r/2, r]], where
r is a random number of which the field knows that its square is 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from shardkit.testing.exact.field import Field, UnsupportedError, mixed
from shardkit.testing.exact.operands import MeshRules, stacked
from shardkit.testing.exact.tower import inverses
from shardkit.testing.exact.values import CONSTANT, INPUT, OUTSIDE, TRULY, Degree, Exact, facts

# What is not only sums, products and quotients.
FACTORS = {"cholesky", "qr", "eigh", "svd"}
_ROW = 2**20  # the distance of the places of two rows


def solve_triangular(rules: MeshRules, equation: Any, a: Any, b: Any) -> Exact:
    """triangular_solve, by substitution."""
    params = equation.params
    a, b = rules.exact(a, b)
    lower, transposed = params["lower"], params["transpose_a"]
    if not params["left_side"]:  # x a = b is a^T x^T = b^T
        b, transposed = _transposed(b), not transposed
    if transposed:
        a, lower = _transposed(a), not lower
    x = _substituted(rules.field, a, b, lower, params["unit_diagonal"])
    if rules.field.grams and not params["unit_diagonal"]:
        x = _known_solution(rules.field, a, b, x, lower)
    return x if params["left_side"] else _transposed(x)


def factor_lu(rules: MeshRules, equation: Any, a: Exact) -> list[Any]:
    """lu: the factors in one matrix, the rows that were swapped, and the order of all rows."""
    field = rules.field
    lu, swaps, order = _eliminated(field, field.plain(a))
    return [lu, field.follow(swaps, natural=True), field.follow(order, natural=True)]


def factor_cholesky(rules: MeshRules, equation: Any, a: Exact) -> Exact:
    """cholesky: the lower factor, of the lower triangle."""
    field = rules.field
    field.uninterpreted.add("cholesky")
    a = _symmetric(field, field.plain(a), lower=True)
    factor = _cholesky(field, a)
    _keep_gram(field, _transposed(factor), a)
    return factor


def factor_qr(rules: MeshRules, equation: Any, a: Exact) -> list[Any]:
    """qr, of wide matrices too."""
    field, params = rules.field, equation.params
    a = field.plain(a)
    m, n = a.shape[-2:]
    if params["pivoting"]:
        raise UnsupportedError("qr with pivoting, whose order of columns follows from floats,")
    if params["full_matrices"] and m > n:
        raise UnsupportedError("qr with full_matrices or mode='complete', whose last columns are any basis,")
    field.uninterpreted.add("qr")
    left = _part(a, slice(None), slice(0, m))
    real_q, real_r = _real(np.linalg.qr, a, [(m, min(m, n)), (min(m, n), n)])
    squares = gram(field, left)
    factor = _cholesky(field, squares)
    q = _transposed(_substituted(field, factor, _transposed(left), lower=True, unit=False))
    upper = _transposed(factor)
    positive = _signs(rules, equation, left, np.diagonal(real_r, axis1=-2, axis2=-1))
    q = field.where(positive[..., None, :], q, field.negative(q))
    r = field.where(positive[..., :, None], upper, field.negative(upper))
    if n > m:
        rest = _solved(field, left, _part(a, slice(None), slice(m, n)))
        r = stacked(field, [r, field.matmul(r, rest)], len(r.shape) - 1)
    q, r = (field.settled(replace(x, real=real)) for x, real in ((q, real_q), (r, real_r)))
    if n <= m:
        for kept in (upper, r):
            _keep_gram(field, kept, squares)
        identity = field.lifted(np.broadcast_to(np.eye(n, dtype=np.float32), squares.shape))
        for kept in (q, _transposed(q)) if m == n else (q,):
            _keep_gram(field, kept, identity)
    return [q, r]


def factor_symmetric(rules: MeshRules, equation: Any, a: Exact) -> list[Any]:
    """eigh: vectors, then values."""
    n = a.shape[-1]
    if equation.params.get("subset_by_index") not in (None, (0, n)):
        raise UnsupportedError("eigh with subset_by_index")
    field = rules.field
    field.uninterpreted.add("eigh")
    triangle = "L" if equation.params["lower"] else "U"
    a = _symmetric(field, field.plain(a), equation.params["lower"])
    values, vectors = _real(partial(np.linalg.eigh, UPLO=triangle), a, [(n,), (n, n)])
    word = _word(field, "eigh", _part_of_triangle(a.number))
    nearest = np.argsort(np.abs(values[0]), -1, kind="stable")
    zero = np.argsort(nearest, -1) < n - _rank(field, a)[..., None]
    w = _opaque(field, "eigenvalues", a, word, values)
    v = _opaque(field, f"eigenvectors {triangle}", a, word, vectors)  # whose signs hang on the triangle
    return [v, _with_zeros(field, w, zero)]


def factor_singular(rules: MeshRules, equation: Any, a: Exact) -> list[Any]:
    """svd: values, and vectors of both sides."""
    params = equation.params
    m, n = a.shape[-2:]
    least = min(m, n)
    if params.get("subset_by_index") not in (None, (0, least)):
        raise UnsupportedError("svd with subset_by_index")
    field = rules.field
    field.uninterpreted.add("svd")
    a = field.plain(a)
    full = params["full_matrices"] and params["compute_uv"]
    left, right = (m, m if full else least), (n if full else least, n)

    def numpy_svd(x: np.ndarray) -> Any:
        u, s, vt = np.linalg.svd(x, full_matrices=full)
        return s, u, vt

    real_s, real_u, real_vt = _real(numpy_svd, a, [(least,), left, right])
    word = _word(field, "svd", a.number.reshape(*a.number.shape[:-2], -1))
    s = _opaque(field, "singular values", a, word, real_s, sign=1)
    s = _with_zeros(field, s, np.arange(least) >= _rank(field, a)[..., None])
    if not params["compute_uv"]:
        return [s]
    u = _opaque(field, "left singular vectors", a, word, real_u)
    vt = _opaque(field, "right singular vectors", a, word, real_vt)
    return [s, u, vt]


def solve_tridiagonal(rules: MeshRules, equation: Any, lower: Any, diagonal: Any, upper: Any, b: Any) -> Exact:
    """tridiagonal_solve."""
    field = rules.field
    lower, diagonal, upper = (field.plain(x) for x in rules.exact(lower, diagonal, upper))
    [b] = rules.exact(b)
    n = diagonal.shape[-1]
    a = field.lifted(np.zeros((*(1,) * (len(diagonal.shape) - 1), n, n), np.float32))
    for band, off in ((lower, -1), (diagonal, 0), (upper, 1)):
        column = band.moved(lambda part: part[..., :, None])
        a = field.where(np.eye(n, k=off, dtype=bool), column, a)
    return _solved(field, a, b)


# Laws of products


def gram(field: Field, a: Exact) -> Exact:
    """A^T A of [..., m, n], in which what is kept of the products of its rows stands for them."""
    product = field.matmul(_transposed(a), a)
    n = a.shape[-1]
    number, known = product.number, product.facts.copy()
    np.einsum("...ii->...i", known[0])[...] = 1
    degree = product.degree
    heights = sorted({height for height, width, _ in field.grams if width == n}, reverse=True)
    if heights:
        number = number.copy()
        masked, p = _masked(field, a), field.moduli[:, None, None]
        for place in np.ndindex(*a.shape[:-2]):
            kept, rest = _kept_rows(field, masked[(slice(None), *place)], heights)
            if kept:
                rows = a.number[(slice(None), *place)][:, rest]
                total = _product(field, rows.swapaxes(1, 2), rows)
                for squares, squares_degree in kept:
                    total = (total + squares) % p
                    degree = degree.plus(squares_degree)
                number[(slice(None), *place)] = total
    return field.settled(Exact(number, known, product.real, degree=degree))


def known_product(field: Field, x: Exact, y: Exact) -> Exact | None:
    """x y of matrices where x is the transposed y, and something is kept of the products of its rows."""
    if not field.grams or x.factor is not None or y.factor is not None:
        return None
    same = x.number.shape == _transposed(y).number.shape and np.array_equal(x.number, _transposed(y).number)
    return gram(field, y) if same else None


def _known_solution(field: Field, a: Exact, b: Exact, x: Exact, lower: bool) -> Exact:
    """x of a x = b, where a is a factor L or L^T of a matrix that is kept.

    The product of L^-1 b with itself is b^T A^-1 b, and L^-T of it is A^-1 b.
    """
    a = a.moved(lambda part: np.broadcast_to(part, (len(part), *x.shape[:-2], *part.shape[-2:])))
    upper, n = _transposed(a) if lower else a, a.shape[-1]
    factors, parts = _masked(field, upper), _masked(field, x if lower else b)
    places = [(slice(None), *place) for place in np.ndindex(*x.shape[:-2])]
    kept = [field.grams.get((n, n, factors[at].tobytes())) for at in places]
    if x.special or not n or any(each is None for each in kept):
        return x
    if lower:
        squares = field.matmul(a, upper)
        for at, (number, degree) in zip(places, kept, strict=True):  # type: ignore[misc]
            squares.number[at] = number
            squares = replace(squares, degree=squares.degree.plus(degree))
        whole = _solved(field, squares, b)
        _keep_gram(field, x, field.matmul(_transposed(field.plain(b)), whole))
        _keep_halves(field, factors, parts, whole)
        return x
    return _with_halves(field, factors, parts, x)


def _keep_halves(field: Field, factors: np.ndarray, parts: np.ndarray, whole: Exact) -> None:
    """Keeps A^-1 b for the factor of A and L^-1 b, column by column."""
    for place in np.ndindex(*whole.shape[:-2]):
        at = (slice(None), *place)
        for column in range(whole.shape[-1]):
            key = factors[at].tobytes(), parts[at][..., column].tobytes()
            field.halves[key] = whole.number[at][..., column], whole.degree


def _with_halves(field: Field, factors: np.ndarray, parts: np.ndarray, x: Exact) -> Exact:
    """L^-T of columns, of which A^-1 b is kept."""
    number, degree = x.number.copy(), x.degree
    for place in np.ndindex(*x.shape[:-2]):
        at = (slice(None), *place)
        for column in range(x.shape[-1]):
            half = field.halves.get((factors[at].tobytes(), parts[at][..., column].tobytes()))
            if half is not None:
                number[(*at, slice(None), column)] = half[0]
                degree = degree.plus(half[1])
    return replace(x, number=number, degree=degree)


def _product(field: Field, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of numbers [components, m, k] and [components, k, n]."""
    p = field.moduli[:, None, None]
    total = np.zeros((len(x), x.shape[1], y.shape[2]), np.uint64)
    for i in range(x.shape[2]):
        total = (total + x[:, :, i : i + 1] * y[:, i : i + 1] % p) % p
    return total


def _kept_rows(field: Field, a: np.ndarray, heights: Sequence[int]) -> tuple[list[tuple[np.ndarray, Degree]], Any]:
    """What is kept of blocks of rows of [components, m, n], and the other rows."""
    kept: list[tuple[np.ndarray, Degree]] = []
    rest: list[int] = []
    m, n = a.shape[1:]
    row = 0
    while row < m:
        for height in heights:
            block = a[:, row : row + height]
            squares = field.grams.get((height, n, block.tobytes())) if row + height <= m else None
            if squares is not None:
                kept.append(squares)
                row += height
                break
        else:
            rest.append(row)
            row += 1
    return kept, rest


def _keep_gram(field: Field, a: Exact, squares: Exact) -> None:
    """Keeps A^T A for each matrix [..., m, n]."""
    masked = _masked(field, a)
    m, n = a.shape[-2:]
    for place in np.ndindex(*a.shape[:-2]):
        at = (slice(None), *place)
        if not a.poison[place].any():
            field.grams[m, n, masked[at].tobytes()] = squares.number[at], squares.degree


def _masked(field: Field, a: Exact) -> np.ndarray:
    """The numbers of matrices, zero in the components that have no meaning."""
    used = a.used[0].max((-2, -1), initial=0)
    level = np.repeat(np.arange(field.levels), field.points).reshape(-1, *[1] * used.ndim)
    return np.where((level >= used)[..., None, None], a.number, np.uint64(0))


# Elimination


def _substituted(field: Field, a: Exact, b: Exact, lower: bool, unit: bool) -> Exact:
    """x of a x = b, for a triangular [..., n, n] and [..., n, k]."""
    a, b = field.plain(a), field.plain(b)
    n = a.shape[-1]
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    b = b.moved(lambda part: np.broadcast_to(part, (len(part), *lead, *part.shape[-2:])))
    inverses = None if unit else _diagonal_inverses(field, a)
    rows: list[Exact] = []
    for i in range(n) if lower else range(n - 1, -1, -1):
        row = _part(b, slice(i, i + 1), slice(None))
        if rows:
            ready = slice(0, i) if lower else slice(i + 1, n)
            before = stacked(field, rows if lower else rows[::-1], len(b.shape) - 2)
            row = field.sub(row, field.matmul(_part(a, slice(i, i + 1), ready), before))
        if inverses is not None:
            row = field.mul(row, _part(inverses, slice(i, i + 1), slice(None)))
        rows.append(row)
    if not rows:
        return b
    whole = stacked(field, rows if lower else rows[::-1], len(b.shape) - 2)
    degree = _over_determinants(field, a, n, 1).times(a.degree.to_the(n - 1)).times(b.degree)
    return replace(whole, degree=degree)


def _eliminated(field: Field, a: Exact) -> tuple[Exact, np.ndarray, np.ndarray]:
    """LU in one matrix, with the row that was swapped in each step, and the order of all rows."""
    m, n = a.shape[-2:]
    lead, steps, x = a.shape[:-2], min(m, n), a
    swaps = np.zeros((*lead, steps), np.int32)
    order = np.broadcast_to(np.arange(m, dtype=np.int32), (*lead, m)).copy()
    rows, columns = np.arange(m)[:, None], np.arange(n)
    for k in range(steps):
        size = np.abs(field.key(_part(x, slice(None), slice(k, k + 1))))[..., 0]
        largest = np.where(np.arange(m) < k, -1.0, size).argmax(-1)
        swaps[..., k] = largest
        swapped = np.broadcast_to(np.arange(m), (*lead, m)).copy()
        np.put_along_axis(swapped, largest[..., None], k, -1)
        swapped[..., k] = largest
        order = np.take_along_axis(order, swapped, -1)
        x = _reordered(x, swapped)
        pivot = _part(x, slice(k, k + 1), slice(k, k + 1))
        # Below a pivot that is zero all is zero, and stays so.
        inverse = field.inverse(field.where(field.is_zero(pivot), _one(field, pivot), pivot))
        column = field.mul(_part(x, slice(None), slice(k, k + 1)), inverse)
        less = field.sub(x, field.mul(column, _part(x, slice(k, k + 1), slice(None))))
        x = field.where((rows > k) & (columns > k), less, x)
        x = field.where((rows > k) & (columns == k), column, x)
    degree = _over_determinants(field, a, steps, steps).times(a.degree.to_the(steps))
    return replace(x, degree=degree), swaps, order


def _solved(field: Field, a: Exact, b: Exact) -> Exact:
    """x of a x = b, for any a [..., n, n] and [..., n, k]."""
    lu, _, order = _eliminated(field, a)
    b = field.plain(b)
    ahead = _substituted(field, lu, _reordered(b, order), lower=True, unit=True)
    x = _substituted(field, lu, ahead, lower=False, unit=False)
    degree = _over_determinants(field, a, a.shape[-1], 1).times(a.degree.to_the(a.shape[-1] - 1)).times(b.degree)
    return replace(x, degree=degree)


def _cholesky(field: Field, a: Exact) -> Exact:
    """The lower factor of a symmetric matrix; outside of its domain where that is not positive definite."""
    n = a.shape[-1]
    rows, columns = np.arange(n)[:, None], np.arange(n)
    x, pivots = a, []
    singular = np.zeros(a.shape[:-2], bool)
    for k in range(n):
        pivot = _part(x, slice(k, k + 1), slice(k, k + 1))
        zero = field.is_zero(pivot)
        if field.order is None:
            zero = zero | (pivot.real[0] <= 0)
        singular = singular | zero[..., 0, 0]
        pivot = field.where(zero, _one(field, pivot), pivot).signed(1)
        pivots.append(pivot)
        column = field.mul(_part(x, slice(None), slice(k, k + 1)), field.inverse(pivot))
        less = field.sub(x, field.mul(column, _part(x, slice(k, k + 1), slice(None))))
        x = field.where((rows > k) & (columns > k), less, x)
        x = field.where((rows > k) & (columns == k), column, x)
    if not pivots:
        return a
    x = field.where(rows == columns, _one(field, x), x)
    x = field.where(rows < columns, field.lifted(np.zeros((1,) * len(a.shape), np.float32)), x)
    x = field.mul(x, field.root(stacked(field, pivots, len(x.shape) - 1)))
    code = np.maximum(np.where(singular, OUTSIDE, 0), _spoiled_by(field, a))
    degree = _over_determinants(field, a, n, n).times(a.degree.to_the(n)).times(INPUT)
    known = x.facts.copy()
    known[4] = np.maximum(known[4], code[..., None, None])
    return field.settled(replace(x, facts=known, degree=degree))


def _over_determinants(field: Field, a: Exact, n: int, count: int) -> Degree:
    """The degree of the inverses of so many determinants of n rows, at most, of each matrix."""
    if not a.degree.total:
        return CONSTANT
    return field.inverse_degree(a.degree.to_the(n), count * math.prod(a.shape[:-2]))


def _rank(field: Field, a: Exact) -> np.ndarray:
    """The rank of each matrix [..., m, n], the highest at any point."""
    valid = field.valid(a.used[0].max((-2, -1), initial=0))
    x, p = a.number, field.moduli.reshape(-1, *[1] * (a.number.ndim - 1))
    m, n = a.shape[-2:]
    free = np.ones((*x.shape[:-2], m, 1), bool)  # rows that no pivot is in
    for k in range(n):
        column = np.where(free, x[..., k : k + 1], np.uint64(0))
        at = (column != 0).argmax(-2)[..., None]
        pivot = np.take_along_axis(column, at, -2)
        row = np.take_along_axis(x, at, -2)
        factors = column * inverses(pivot, p) % p
        here = (np.arange(m)[:, None] == at) & (pivot != 0)
        free = free & ~here
        less = (x + p * p - factors * row % p) % p
        x = np.where(free & (pivot != 0), less, x)
    return np.asarray(np.where(valid, (~free).sum((-2, -1)), 0).max(0))


# Uninterpreted functions of a matrix


def _part_of_triangle(number: np.ndarray) -> np.ndarray:
    rows, columns = np.tril_indices(number.shape[-1])
    return number[..., rows, columns]


def _word(field: Field, name: str, elements: np.ndarray) -> np.ndarray:
    """A random word of all elements [components, ..., n], each at its place."""
    places = mixed(field.salt(name)[:, None], np.arange(elements.shape[-1], dtype=np.uint64))
    places = places.reshape(len(elements), *[1] * (elements.ndim - 2), -1)
    return np.asarray(mixed(mixed(elements, places).sum(-1, np.uint64)))


def _opaque(field: Field, name: str, a: Exact, word: np.ndarray, real: np.ndarray, sign: int = 0) -> Exact:
    """Random numbers for a word of each matrix, one for every place of the shape of their real values."""
    own = real.shape[1 + len(a.shape) - 2 :]
    places = np.arange(own[-1], dtype=np.uint64)
    if len(own) == 2:
        places = places + np.uint64(_ROW) * np.arange(own[0], dtype=np.uint64)[:, None]
    salts = mixed(field.salt(name).reshape(-1, *[1] * places.ndim), places)
    salts = salts.reshape(len(salts), *[1] * (word.ndim - 1), *own)
    number = mixed(word.reshape(*word.shape, *[1] * len(own)), salts)
    number = number % field.p(number)

    def whole(part: np.ndarray) -> np.ndarray:
        return np.broadcast_to(part.reshape(*part.shape, *[1] * len(own)), number.shape[1:])

    known = facts(number.shape[1:], sign, 0, whole(a.used[0].max((-2, -1))), 0, whole(_spoiled_by(field, a)))
    return field.settled(Exact(number, known, real, degree=INPUT))


def _spoiled_by(field: Field, a: Exact) -> np.ndarray:
    """The poison that each matrix has from its elements."""
    infinite = (np.abs(a.infinite) == TRULY).any((-2, -1))
    return np.maximum(a.poison.max((-2, -1), initial=0), np.where(infinite, field.created, 0))


def _with_zeros(field: Field, x: Exact, zero: np.ndarray) -> Exact:
    return field.where(zero & (x.poison == 0), field.lifted(np.zeros((1,) * len(x.shape), np.float32)), x)


def _signs(rules: MeshRules, equation: Any, a: Exact, diagonal: np.ndarray) -> np.ndarray:
    """Whether each element of R's diagonal is positive, which follows from all of A."""
    word = _word(rules.field, "signs of qr", a.number.reshape(*a.number.shape[:-2], -1))
    x = _opaque(rules.field, "sign of qr", a, word, diagonal)
    zero = rules.field.lifted(np.zeros((1,) * len(x.shape), np.float32))
    return rules.decide(equation, rules.field.key(x) >= 0, x, zero)


def _real(function: Callable[[np.ndarray], Any], a: Exact, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """What numpy computes of real matrices; NaN where they are no numbers."""
    x = a.real[0]
    finite = np.isfinite(x).all((-2, -1))
    try:
        results = [np.asarray(y) for y in function(np.where(finite[..., None, None], x, 0.0))]
    except np.linalg.LinAlgError:
        results = [np.full((*x.shape[:-2], *shape), math.nan) for shape in shapes]
    return [np.where(finite.reshape(*finite.shape, *[1] * (y.ndim - finite.ndim)), y, math.nan)[None] for y in results]


# Parts of matrices


def _symmetric(field: Field, a: Exact, lower: bool) -> Exact:
    """The symmetric matrix of which one triangle is read."""
    n = a.shape[-1]
    read = np.tri(n, dtype=bool) if lower else np.tri(n, dtype=bool).T
    return field.where(read, a, _transposed(a))


def _transposed(a: Exact) -> Exact:
    return a.moved(lambda part: part.swapaxes(-1, -2))


def _part(a: Exact, rows: slice, columns: slice) -> Exact:
    return a.moved(lambda part: part[..., rows, columns])


def _diagonal_inverses(field: Field, a: Exact) -> Exact:
    """[..., n, 1]."""
    return field.inverse(a.moved(lambda part: np.diagonal(part, axis1=-2, axis2=-1)[..., None]))


def _reordered(a: Exact, order: np.ndarray) -> Exact:
    """Matrices [..., m, n] with their rows in another order [..., m]."""
    lead = np.broadcast_shapes(a.shape[:-2], order.shape[:-1])
    at = np.broadcast_to(order, (*lead, order.shape[-1]))[None, ..., None]

    def move(part: np.ndarray) -> np.ndarray:
        return np.take_along_axis(np.broadcast_to(part, (len(part), *lead, *part.shape[-2:])), at, -2)

    return a.moved(move)


def _one(field: Field, like: Exact) -> Exact:
    return field.lifted(np.ones((1,) * len(like.shape), np.float32))
