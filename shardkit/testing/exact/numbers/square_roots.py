"""Square roots, and the laws of their products, by the ids of `roots.py`."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from shardkit.testing.exact.numbers.errors import TooDeepError
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.functions import apply_function
from shardkit.testing.exact.numbers.logarithms import to_number
from shardkit.testing.exact.numbers.roots import NO_ROOT, Product, Root, Roots, Square
from shardkit.testing.exact.numbers.tower import raise_residues
from shardkit.testing.exact.numbers.values import CONSTANT, INPUT, TRULY, Degree, Exact, build_facts, list_columns

_POWERS_OF_TWO = (1, -1, 2, -2, 3, -3)  # 2, 1 / 2, 4, ... of which the squares may be taken out of a root


def square_root(field: Field, x: Exact) -> Exact:
    """The square root: uninterpreted, but for its laws."""
    x = to_number(field, x)
    if x.is_power and field.settings.laws_of_roots:
        return raise_power(field, x, Fraction(1, 2))
    root = apply_function(field, "sqrt", x, sign=1, never_zero=x.never_zero)
    _remember_squares(field, x, root)
    if not field.settings.laws_of_roots:
        return root
    return _apply_laws(field, x, root)


def _remember_squares(field: Field, x: Exact, root: Exact) -> None:
    """Remembers x by the residues of its root."""
    roots = field.laws.roots
    words = list_columns(root.number)
    squares = list_columns(x.number)
    rows = zip(words, squares, root.poison.flat, x.used.flat, strict=True)
    for word, square, poison, used in rows:
        if not poison:
            roots.squares[word.tobytes()] = Square(square, int(used), x.is_power)
    roots.add_degree_of_squares(x.degree)


def find_squares(field: Field, x: Exact) -> Exact | None:
    """The squares of an array whose elements are all square roots; None for others."""
    roots = field.laws.roots
    if not roots.squares or not x.number.size:
        return None
    columns = []
    for word, poison in zip(list_columns(x.number), x.poison.flat, strict=True):
        if poison:  # NaN: its square is NaN too
            columns.append(word)
            continue
        square = roots.squares.get(word.tobytes())
        if square is None:
            return None
        columns.append(square.number)
    number = np.stack(columns, 1).reshape(x.number.shape)
    infinite = np.where(x.is_truly_infinite, TRULY, 0)
    facts = build_facts(x.shape, 1, infinite, x.used, poison=x.poison, never_zero=x.never_zero)
    return field.settle(Exact(number, facts, x.real**2, degree=roots.degree_of_squares))


# The laws of roots


class _DrawnRoots(NamedTuple):
    """Roots whose numbers were drawn, side by side.

    Attributes:
        numbers: uint64 [components, roots].
        squares: uint64 [components, roots], their arguments.
        used: int8 [roots], how many primes exps have used up on the way to them.
        ids_of_squares: int32 [roots], the id of a root of which a square is known to be a multiple.
    """

    numbers: np.ndarray
    squares: np.ndarray
    used: np.ndarray
    ids_of_squares: np.ndarray


def _apply_laws(field: Field, x: Exact, root: Exact) -> Exact:
    """The roots of x as multiples of roots that were drawn, of which some were drawn before.

    Worked example: the roots of [a, 1, 4 a, a] were drawn as [g, h, k, g]. The root of 1 is 1. a is new: its root g
    gets the id 1. 4 a is new too, but its root is 2 sqrt(a), so that k is never used: the numbers are [g, 1, 2 g, g],
    and the ids [1, 0, 1, 1].
    """
    roots = field.laws.roots
    valid = field.valid(x.used)
    is_one = ((x.number == 1) | ~valid).all(0)
    is_number = (root.poison == 0) & (root.infinite == 0)
    is_drawn = ~is_one & ~field.is_zero(x) & is_number
    places = np.flatnonzero(is_drawn).tolist()
    keys = _make_keys(x.number, valid)
    _add_new_roots(field, x, root, keys, places)

    ids = np.zeros(is_one.size, np.int32)
    factors = np.ones((len(x.number), is_one.size), np.uint64)
    has_factors = False
    for place in places:
        multiple = roots.by_square[keys[place]]
        ids[place] = multiple.id
        if multiple.factor is not None:
            factors[:, place] = multiple.factor
            has_factors = True
    degree = roots.degree
    if has_factors:
        degree = roots.degree_of_inverses.times(degree)
    ids = ids.reshape(is_one.shape)
    factors = factors.reshape(x.number.shape)
    numbers = roots.numbers(ids) * factors % field.residues.primes_of(factors)
    number = np.where(ids != NO_ROOT, numbers, root.number)
    number = np.where(is_one, np.uint64(1), number)
    return Exact(number, root.facts, root.real, degree=degree, roots=ids[None])


def _add_new_roots(field: Field, x: Exact, root: Exact, keys: Sequence[bytes], places: Sequence[int]) -> None:
    """Adds the roots at those places whose argument has no root yet."""
    first_places: dict[bytes, int] = {}
    for place in places:
        if keys[place] not in field.laws.roots.by_square:
            first_places.setdefault(keys[place], place)
    if not first_places:
        return
    new = np.array(list(first_places.values()))
    drawn = _DrawnRoots(
        numbers=root.number.reshape(len(root.number), -1)[:, new],
        squares=x.number.reshape(len(x.number), -1)[:, new],
        used=x.used.reshape(-1)[new],
        ids_of_squares=x.roots_or_zeros.reshape(-1)[new],
    )
    _add_roots(field, drawn, x.degree)


def remember_roots(field: Field, roots: Roots, degree: Degree) -> None:
    """Adds the roots of a run of the same programs: so a product finds the roots that are drawn after it, too."""
    if not roots.squares:
        return
    numbers = np.stack([np.frombuffer(word, np.uint64) for word in roots.squares], 1)
    squares = np.stack([square.number for square in roots.squares.values()], 1)
    used = np.array([square.used for square in roots.squares.values()], np.int8)
    is_power = np.array([square.is_power for square in roots.squares.values()])
    is_zero = (numbers == 0).all(0)
    is_one = (squares == 1).all(0)
    # The roots of 0 and 1 are no random numbers, and to those of exps a law of their own applies.
    is_drawn = ~is_zero & ~is_one & ~is_power
    ids_of_squares = np.zeros(int(is_drawn.sum()), np.int32)
    drawn = _DrawnRoots(numbers[:, is_drawn], squares[:, is_drawn], used[is_drawn], ids_of_squares)
    _add_roots(field, drawn, degree)


def _add_roots(field: Field, drawn: _DrawnRoots, degree: Degree) -> None:
    """Adds roots that were drawn, but for those of 4, 16 or 64 times the square of another."""
    roots = field.laws.roots
    numbers = drawn.numbers
    squares = drawn.squares
    p = field.residues.primes_of(squares)
    valid = field.valid(drawn.used)
    # 1 / (h y) is the one inverse for both: 1 / h is y times it, and 1 / y is h times it.
    inverses_of_both = field.invert_residues(squares * numbers % p, drawn.used)
    inverses = squares * inverses_of_both % p
    inverses_of_squares = numbers * inverses_of_both % p
    keys = _make_keys(squares, valid)
    keys_of_inverses = _make_keys(inverses_of_squares, valid)
    # sqrt(4 x) is 2 sqrt(x): the root of x is known if that of 4 x is, of x / 4, of 16 x, ...
    scaled = []
    for power in _POWERS_OF_TWO:
        multiples = squares * _power_of_two(field, 2 * power) % p
        scaled.append(_make_keys(multiples, valid))
    rows = zip(
        list_columns(numbers),
        list_columns(inverses),
        list_columns(squares),
        list_columns(inverses_of_squares),
        strict=True,
    )
    for place, (number, inverse, square, inverse_of_square) in enumerate(rows):
        key = keys[place]
        if key in roots.by_square or _add_scaled_root(field, key, [keys[place] for keys in scaled]):
            continue
        id_of_square = int(drawn.ids_of_squares[place])
        if id_of_square == NO_ROOT:
            id_of_square = roots.ids.get(square.tobytes(), NO_ROOT)
        used = int(drawn.used[place])
        root = Root(number, inverse, square, inverse_of_square, id_of_square, used)
        roots.add(root, key, keys_of_inverses[place])

    # No term of a root has the inverse. But its divisor was taken for one that is not zero, which a bound counts too.
    degree_of_both = field.degree_of_inverses(degree.times(INPUT), len(keys))
    divisions = {division: (0, weight) for division, (_, weight) in degree_of_both.inverses.items()}
    roots.degree = roots.degree.plus(Degree(1, divisions, degree.log_depth))
    roots.add_degree_of_squares(degree)
    roots.add_degree_of_inverses(INPUT.times(degree_of_both))


def _add_scaled_root(field: Field, key: bytes, keys_of_scaled: Sequence[bytes]) -> bool:
    """Adds the root of x as a multiple of that of 4 x, x / 4, 16 x, ..., and says whether one of these is known."""
    roots = field.laws.roots
    for power, key_of_scaled in zip(_POWERS_OF_TWO, keys_of_scaled, strict=True):
        multiple = roots.by_square.get(key_of_scaled)
        if multiple is not None:
            # sqrt(x) is half of sqrt(4 x).
            factor = _power_of_two(field, -power)[:, 0]
            roots.by_square[key] = multiple.times(factor, field.residues.moduli)
            return True
    return False


def _power_of_two(field: Field, exponent: int) -> np.ndarray:
    """uint64 [components, 1]: 2 to a power."""
    powers = [pow(2, exponent, p) for p in field.residues.moduli.tolist()]
    return np.array(powers, np.uint64)[:, None]


def multiply_roots(field: Field, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray | None, np.ndarray, Degree]:
    """The roots of which products of multiples of two roots are multiples.

    Worked example: [c sqrt(a), d, c sqrt(a)] times [e sqrt(a), f, e sqrt(b)]. The roots of a, b and a b were drawn as
    g, h and k, and have the ids 1, 2 and 3.

        x       [1, 0, 1]
        y       [1, 0, 2]
        factor  [a / g**2, 1, k / (g h)], which takes the products c g e g and c g e h to c e a and c e k
        ids     [0, 0, 3]: c e a is a multiple of no root, and c e k one of root 3

    Args:
        x: int32 [1, ...], ids of roots.
        y: int32 [1, ...], which broadcasts.

    Returns:
        uint64 [components, ...], by which the product of the numbers is multiplied, None for 1; the ids of the
        result; and the degree of the factor.
    """
    x, y = np.broadcast_arrays(x, y)
    has_two = (x != NO_ROOT) & (y != NO_ROOT)
    # c sqrt(a) d is a multiple of the root of a, whose id is x + 0.
    ids = np.where(has_two, NO_ROOT, x + y)
    if not has_two.any():
        return None, ids, CONSTANT
    roots = field.laws.roots
    # c sqrt(z) d sqrt(z) is c d z.
    is_same = has_two & (x == y)
    same = np.where(is_same, x, NO_ROOT)
    factor = roots.corrections(same[0])
    ids = np.where(is_same, roots.ids_of_squares(same), ids)
    degree = roots.degree_of_squares
    is_different = has_two & ~is_same
    if is_different.any():
        factor = factor.copy()
        products, places = _find_products(field, x[is_different], y[is_different])
        # [components, products], and from there to all places.
        factors = np.stack([product.factor for product in products], 1)
        factor[:, is_different[0]] = factors[:, places]
        ids_of_products = np.array([product.id for product in products], np.int32)
        ids[is_different] = ids_of_products[places]
        degrees = [product.degree for product in products]
        degree = degree.plus(*degrees)
    return factor, ids, degree


def _find_products(field: Field, x: np.ndarray, y: np.ndarray) -> tuple[list[Product], np.ndarray]:
    """The distinct products of roots x [n] and y [n], by their ids; and for each place [n] which of them it is.

    Worked example: of x = [1, 2, 1] and y = [2, 1, 3] these are the products of 1 and 2 and of 1 and 3, at the places
    [0, 0, 1].
    """
    roots = field.laws.roots
    pairs = np.stack([np.minimum(x, y), np.maximum(x, y)])
    distinct, places = np.unique(pairs, axis=1, return_inverse=True)
    products = []
    for first, second in distinct.T.tolist():
        if (first, second) not in roots.products:
            roots.products[first, second] = _make_product(field, roots[first], roots[second])
        products.append(roots.products[first, second])
    return products, places.reshape(-1)


def _make_product(field: Field, x: Root, y: Root) -> Product:
    """The product of two roots that a run multiplies for the first time.

    Worked example: the roots g of a and h of b. If the run has drawn the root k of a b, the product is that root: its
    factor is k / (g h), by which the product g h of the numbers becomes k. If not, g h is the root of a b from now on.
    """
    p = field.residues.moduli
    used = max(x.used, y.used)
    valid = field.valid(np.array(used))
    if not valid.any():  # by no residue all products would be the same
        raise TooDeepError
    square = x.square * y.square % p
    inverse = x.inverse * y.inverse % p
    product = _find_known_product(field, x, y, valid, square, inverse)
    if product is not None:
        return product
    inverse_of_square = x.inverse_of_square * y.inverse_of_square % p
    # a b is a multiple of a root if just one of a and b is.
    id_of_square = NO_ROOT
    if NO_ROOT in (x.id_of_square, y.id_of_square):
        id_of_square = max(x.id_of_square, y.id_of_square)
    number = x.number * y.number % p
    drawn = x.drawn + y.drawn
    root = Root(number, inverse, square, inverse_of_square, id_of_square, used, drawn)
    # `sqrt(a b)` is this product wherever it has a value: if both are negative, no other number hangs on their roots.
    id = field.laws.roots.add(root, _make_key(square, valid), _make_key(inverse_of_square, valid))
    return Product(np.ones_like(p), id, CONSTANT)


def _find_known_product(
    field: Field, x: Root, y: Root, valid: np.ndarray, square: np.ndarray, inverse: np.ndarray
) -> Product | None:
    """sqrt(a) sqrt(b) as sqrt(a b), or as b sqrt(a / b), if the run has one of these; a and b are positive.

    `square` has the residues of a b, and `inverse` those of 1 / (sqrt(a) sqrt(b)).
    """
    p = field.residues.moduli
    roots = field.laws.roots
    quotient = x.square * y.inverse_of_square % p
    # 1 sqrt(a b) and b sqrt(a / b): what is under the root, what is before it, and the degree of that.
    candidates = [(square, np.ones_like(p), CONSTANT), (quotient, y.square, roots.degree_of_squares)]
    for radicand, coefficient, degree_of_coefficient in candidates:
        multiple = roots.by_square.get(_make_key(radicand, valid))
        if multiple is None:
            continue
        factor = coefficient * roots[multiple.id].number % p
        degree = roots.degree.times(degree_of_coefficient)
        if multiple.factor is not None:
            factor = factor * multiple.factor % p
            degree = degree.times(roots.degree_of_inverses)
        # The numbers of both roots have a product already, by whose inverse the known one is multiplied.
        return Product(factor * inverse % p, multiple.id, degree)
    return None


def _make_key(x: np.ndarray, valid: np.ndarray) -> bytes:
    """The residues [components] that have a meaning."""
    return np.where(valid, x, np.uint64(0)).tobytes()


def _make_keys(x: np.ndarray, valid: np.ndarray) -> list[bytes]:
    """The same for each element of [components, ...], in row-major order."""
    columns = list_columns(np.where(valid, x, np.uint64(0)))
    words = columns.tobytes()
    width = columns.itemsize * columns.shape[1]
    return [words[start : start + width] for start in range(0, len(words), width)]


def raise_power(field: Field, x: Exact, exponent: Fraction) -> Exact:
    """exp(y) to a positive power that is no whole number, by the law exp(y)**a = exp(a y).

    Worked example: modulo 11, where exp(y) is 4**y for y modulo 5, the root of exp(3) is 4**(3 / 2). A half is 3
    modulo 5, so that is 4**9 = 4**4 = 3; its square is 9, which is 4**3.
    """
    p = field.residues.primes_of(x.number)
    points = field.settings.points
    # A third is a number modulo each prime, as any rational is.
    residues = []
    for modulus in p.ravel().tolist():
        residues.append(exponent.numerator * pow(exponent.denominator, -1, modulus) % modulus)
    exponents = np.array(residues, np.uint64).reshape(p.shape)
    # One prime lower, as the exponent of an exp; the lowest prime has none, and no exp has a meaning there.
    exponents = np.concatenate([exponents[:points], exponents[:-points]])
    number = raise_residues(x.number, exponents, p)
    infinite = np.where(x.is_truly_infinite, TRULY, 0)
    facts = build_facts(x.shape, 1, infinite, x.used, poison=x.poison, never_zero=x.never_zero)
    real = x.real ** float(exponent)
    return field.settle(Exact(number, facts, real, degree=x.degree, is_power=True))


def find_common_roots(roots: np.ndarray, dims: Sequence[int], keep: bool) -> np.ndarray:
    """int32 [1, ...]: the root of which all elements along some dims are multiples, else none."""
    dims = tuple(dims)
    least = roots.min(dims, keepdims=keep, initial=np.iinfo(np.int32).max)
    most = roots.max(dims, keepdims=keep, initial=NO_ROOT)
    return np.where(least == most, most, NO_ROOT)
