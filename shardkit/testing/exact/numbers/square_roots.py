"""Square roots, and the laws of their products, by the ids of `roots.py`."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from shardkit.testing.exact.numbers.errors import TooDeepError
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.functions import apply_function, list_columns
from shardkit.testing.exact.numbers.logarithms import to_number
from shardkit.testing.exact.numbers.roots import NO_ROOT, Product, Root, Roots, Square
from shardkit.testing.exact.numbers.tower import raise_residues
from shardkit.testing.exact.numbers.values import CONSTANT, INPUT, TRULY, Degree, Exact, build_facts

_POWERS_OF_TWO = (1, -1, 2, -2, 3, -3)  # 2, 1 / 2, 4, ... of which the squares may be taken out of a root


def square_root(field: Field, x: Exact) -> Exact:
    """The square root: uninterpreted, but for its laws."""
    x = to_number(field, x)
    if x.is_power and field.settings.laws_of_roots:
        return raise_power(field, x, Fraction(1, 2))
    root = apply_function(field, "sqrt", x, sign=1)
    # The residues of a root are the key by which its square is found.
    columns = zip(list_columns(root.number), list_columns(x.number), strict=True)
    facts = zip(root.poison.flat, x.used.flat, strict=True)
    for (word, square), (poison, used) in zip(columns, facts, strict=True):
        if not poison:
            field.laws.roots.squares[word.tobytes()] = Square(square, int(used), x.is_power)
    field.laws.roots.add_degree_of_squares(x.degree)
    if not field.settings.laws_of_roots:
        return root
    return _find_roots(field, x, root)


def find_squares(field: Field, x: Exact) -> Exact | None:
    """The squares of an array whose elements are all square roots; None for others."""
    if not field.laws.roots.squares or not x.number.size:
        return None
    squares = []
    for word, poison in zip(list_columns(x.number), x.poison.reshape(-1), strict=True):
        square = field.laws.roots.squares.get(word.tobytes())
        if poison:  # NaN: its square is NaN too
            squares.append(word)
        elif square is None:
            return None
        else:
            squares.append(square.number)
    number = np.stack(squares, 1).reshape(x.number.shape)
    infinite = np.where(x.is_truly_infinite, TRULY, 0)
    facts = build_facts(x.shape, 1, infinite, x.used, poison=x.poison)
    return field.settle(Exact(number, facts, x.real**2, degree=field.laws.roots.degree_of_squares))


# The laws of roots


def _find_roots(field: Field, x: Exact, root: Exact) -> Exact:
    """The root that was drawn for x, or the multiple of one that was drawn before."""
    valid = field.valid(x.used)
    is_one = ((x.number == 1) | ~valid).all(0)
    is_drawn = ~is_one & ~field.is_zero(x) & (root.poison == 0) & (root.infinite == 0)
    keys = _list_keys(x.number, valid)
    places = np.flatnonzero(is_drawn)
    fresh: dict[bytes, int] = {}
    for place in places.tolist():
        if keys[place] not in field.laws.roots.by_square:
            fresh.setdefault(keys[place], place)
    if fresh:
        chosen = np.array(list(fresh.values()))
        numbers = root.number.reshape(len(root.number), -1)[:, chosen]
        squares = x.number.reshape(len(x.number), -1)[:, chosen]
        ids_of_squares = x.roots_or_zeros.reshape(-1)[chosen]
        _add_roots(field, numbers, squares, x.used.reshape(-1)[chosen], ids_of_squares, x.degree)

    # Each element by itself, in row-major order.
    ids = np.zeros(is_one.size, np.int32)
    factors = np.ones((len(x.number), is_one.size), np.uint64)
    degree = CONSTANT
    for place in places.tolist():
        multiple = field.laws.roots.by_square[keys[place]]
        ids[place] = multiple.id
        if multiple.factor is not None:
            factors[:, place] = multiple.factor
            degree = field.laws.roots.degree_of_inverses
    degree = degree.times(field.laws.roots.degree)
    ids = ids.reshape(is_one.shape)
    factors = factors.reshape(x.number.shape)
    numbers = field.laws.roots.numbers(ids) * factors % field.residues.primes_of(factors)
    number = np.where(is_one, np.uint64(1), np.where(ids != NO_ROOT, numbers, root.number))
    return Exact(number, root.facts, root.real, degree=degree, roots=ids[None])


def remember_roots(field: Field, roots: Roots, degree: Degree) -> None:
    """Adds the roots of a run of the same programs: so a product finds the roots that are drawn after it, too."""
    if not roots.squares:
        return
    numbers = np.stack([np.frombuffer(word, np.uint64) for word in roots.squares], 1)
    squares = np.stack([square.number for square in roots.squares.values()], 1)
    used = np.array([square.used for square in roots.squares.values()], np.int8)
    is_power = np.array([square.is_power for square in roots.squares.values()])  # of these a law gives the root
    is_drawn = (numbers != 0).any(0) & (squares != 1).any(0) & ~is_power  # nor are the roots of 0 and 1
    ids_of_squares = np.zeros(int(is_drawn.sum()), np.int32)
    _add_roots(field, numbers[:, is_drawn], squares[:, is_drawn], used[is_drawn], ids_of_squares, degree)


def _add_roots(
    field: Field,
    numbers: np.ndarray,
    squares: np.ndarray,
    used: np.ndarray,
    ids_of_squares: np.ndarray,
    degree: Degree,
) -> None:
    """Roots [components, elements] that were drawn, but for those of 4, 16 or 64 times the square of another."""
    p = field.residues.primes_of(squares)
    valid = field.valid(used)
    # 1 / (h y) is the one inverse for both: 1 / h is y times it, and 1 / y is h times it.
    inverses = field.invert_residues(squares * numbers % p, used)
    inverses_of_numbers = squares * inverses % p
    inverses_of_squares = numbers * inverses % p
    keys = _list_keys(squares, valid)
    keys_of_inverses = _list_keys(inverses_of_squares, valid)
    # sqrt(4 x) is 2 sqrt(x): the root of x is known if that of 4 x is, of x / 4, of 16 x, ...
    scaled = []
    for power in _POWERS_OF_TWO:
        scaled.append(_list_keys(squares * _power_of_two(field, 2 * power) % p, valid))
    rows = [list_columns(part) for part in (numbers, inverses_of_numbers, squares, inverses_of_squares)]
    for place, key in enumerate(keys):
        keys_of_scaled = [row[place] for row in scaled]
        if key in field.laws.roots.by_square or _find_scaled_root(field, key, keys_of_scaled):
            continue
        number, inverse, square, inverse_of_square = (row[place] for row in rows)
        id_of_square = int(ids_of_squares[place]) or field.laws.roots.ids.get(square.tobytes(), NO_ROOT)
        root = Root(number, inverse, square, inverse_of_square, id_of_square, int(used[place]))
        field.laws.roots.add(root, key, keys_of_inverses[place])

    # No term of a root has the inverse. But its divisor was taken for one that is not zero, which a bound counts too.
    inverse_degree = field.degree_of_inverses(degree.times(INPUT), len(keys))
    divisions = {division: (0, weight) for division, (_, weight) in inverse_degree.inverses.items()}
    field.laws.roots.degree = field.laws.roots.degree.plus(Degree(1, divisions, degree.log_depth))
    field.laws.roots.add_degree_of_squares(degree)
    field.laws.roots.add_degree_of_inverses(INPUT.times(inverse_degree))


def _find_scaled_root(field: Field, key: bytes, keys_of_scaled: Sequence[bytes]) -> bool:
    """Whether the root of a number is known from the root of 4, 16 or 64 times it, or of a quarter and so on of it."""
    for power, key_of_scaled in zip(_POWERS_OF_TWO, keys_of_scaled, strict=True):
        multiple = field.laws.roots.by_square.get(key_of_scaled)
        if multiple is not None:
            factor = _power_of_two(field, -power)[:, 0]
            field.laws.roots.by_square[key] = multiple.times(factor, field.residues.moduli)
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
    both = (x != NO_ROOT) & (y != NO_ROOT)
    roots = np.where(both, NO_ROOT, x + y)
    if not both.any():
        return None, roots, CONSTANT
    # c sqrt(z) d sqrt(z) is c d z.
    same = np.where(both & (x == y), x, NO_ROOT)
    factor = field.laws.roots.corrections(same[0])
    roots = np.where(same != NO_ROOT, field.laws.roots.ids_of_squares(same), roots)
    degree = field.laws.roots.degree_of_squares
    different = both & (x != y)
    if different.any():
        factor = factor.copy()
        roots = roots.copy()
        pairs = np.stack([np.minimum(x, y)[different], np.maximum(x, y)[different]])
        distinct, places = np.unique(pairs, axis=1, return_inverse=True)
        products = [_find_product(field, first, second) for first, second in distinct.T.tolist()]
        # [components, distinct pairs], and from there to all places.
        factors = np.stack([product.factor for product in products], 1)
        ids = np.array([product.id for product in products], np.int32)
        places = places.reshape(-1)
        factor[:, different[0]] = factors[:, places]
        roots[different] = ids[places]
        degree = degree.plus(*(product.degree for product in products))
    return factor, roots, degree


def _find_product(field: Field, first: int, second: int) -> Product:
    """The product of two roots, by their ids: a root that is known, or a new one."""
    roots = field.laws.roots
    if (first, second) not in roots.products:
        roots.products[first, second] = _make_product(field, roots[first], roots[second])
    return roots.products[first, second]


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
    roots = field.laws.roots
    square = x.square * y.square % p
    inverses = x.inverse * y.inverse % p
    product = _find_known_product(field, x, y, valid, square, inverses)
    if product is not None:
        return product
    inverse_of_square = x.inverse_of_square * y.inverse_of_square % p
    id_of_square = NO_ROOT
    if NO_ROOT in (x.id_of_square, y.id_of_square):
        id_of_square = max(x.id_of_square, y.id_of_square)
    drawn = x.drawn + y.drawn
    root = Root(x.number * y.number % p, inverses, square, inverse_of_square, id_of_square, used, drawn)
    # `sqrt(a b)` is this product wherever it has a value: if both are negative, no other number hangs on their roots.
    id = roots.add(root, _key(square, valid), _key(inverse_of_square, valid))
    return Product(np.ones_like(p), id, CONSTANT)


def _find_known_product(
    field: Field, x: Root, y: Root, valid: np.ndarray, square: np.ndarray, inverses: np.ndarray
) -> Product | None:
    """sqrt(a) sqrt(b) as sqrt(a b), or as b sqrt(a / b), if the run has one of these; a and b are positive.

    `square` has the residues of a b, and `inverses` those of 1 / (sqrt(a) sqrt(b)).
    """
    p = field.residues.moduli
    roots = field.laws.roots
    quotient = x.square * y.inverse_of_square % p
    # 1 sqrt(a b) and b sqrt(a / b): what is under the root, the factor before it, and the degree of that factor.
    candidates = [(square, np.ones_like(p), CONSTANT), (quotient, y.square, roots.degree_of_squares)]
    for radicand, before, degree_before in candidates:
        multiple = roots.by_square.get(_key(radicand, valid))
        if multiple is None:
            continue
        factor = before * roots[multiple.id].number % p
        degree = roots.degree.times(degree_before)
        if multiple.factor is not None:
            factor = factor * multiple.factor % p
            degree = degree.times(roots.degree_of_inverses)
        # The numbers of both roots have a product already, by whose inverse the known one is multiplied.
        return Product(factor * inverses % p, multiple.id, degree)
    return None


def _key(x: np.ndarray, valid: np.ndarray) -> bytes:
    """The residues [components] that have a meaning."""
    return np.where(valid, x, np.uint64(0)).tobytes()


def _list_keys(x: np.ndarray, valid: np.ndarray) -> list[bytes]:
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
    # One prime lower, as the exponent of an exp; the lowest prime has none, and no exp has a meaning there. A third is
    # a number modulo each of them, as any rational is.
    residues = []
    for modulus in p.ravel().tolist():
        residues.append(exponent.numerator * pow(exponent.denominator, -1, modulus) % modulus)
    exponents = np.array(residues, np.uint64).reshape(p.shape)
    exponents = np.concatenate([exponents[:points], exponents[:-points]])
    number = raise_residues(x.number, exponents, p)
    infinite = np.where(x.is_truly_infinite, TRULY, 0)
    facts = build_facts(x.shape, 1, infinite, x.used, poison=x.poison)
    return field.settle(Exact(number, facts, x.real ** float(exponent), degree=x.degree, is_power=True))


def find_common_roots(roots: np.ndarray, dims: Sequence[int], keep: bool) -> np.ndarray:
    """int32 [1, ...]: the root of which all elements along some dims are multiples, else none."""
    least = roots.min(tuple(dims), keepdims=keep, initial=np.iinfo(np.int32).max)
    most = roots.max(tuple(dims), keepdims=keep, initial=NO_ROOT)
    return np.where(least == most, most, NO_ROOT)
