"""Square roots of one run: the argument of each root, and the root that a product of roots is.

The field has no square root of x: half of all residues are no squares, and a residue and its negative have the same
square. So a root h of x is drawn at random, as the value of a function without a law. Sums and quotients are then
right: (x + h) / h is x / h + 1. But x / h is not h, although x / sqrt(x) is sqrt(x). No choice of 1 / h makes both
true, because h**2 is not x in the residues.

So if two programs differ, they are run once more with the laws of roots (`Field.laws_of_roots`). By these laws a
multiple of a root is always written with the root in the numerator:

- an array says for each element of which root it is a multiple, c sqrt(x), by an id in `Exact.roots`;
- the product of two multiples of the same root is c d x, and 1 / (c sqrt(x)) is sqrt(x) / (c x);
- sqrt(x) sqrt(y) is sqrt(x y), whichever of both is computed first; so is sqrt(x / y) y, and sqrt(1 / x) is
  sqrt(x) / x;
- sqrt(4 x) is 2 sqrt(x), and so with 16 and 64: a norm over the root of 16 is the root of a mean over 16.

A rule holds wherever the roots on its left have a value. So both sides of a rule are the same function of the inputs,
and a number that a rule gives is as good as the one that it replaces: taken for polynomials of the inputs and of the
drawn roots, results that are different functions remain different polynomials. A rule that is missing leaves a right
program unproved, and no more. No rule says that sqrt(x**2) is x: it is the root of a number like any other.

Worked example: `x / sqrt(x)`. The root is drawn as h and gets id 1. Its inverse, 1 / h, is written as h / x, which is
again a multiple of root 1. So the quotient is x h / x, which is h: the number of `sqrt(x)`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardkit.testing.exact.numbers.values import CONSTANT, Degree

NO_ROOT = 0  # the id of elements that are no multiples of a root


class Root(NamedTuple):
    """One root, or a product of roots, as residues.

    Attributes:
        number: uint64 [components].
        inverse: uint64 [components], 1 / number.
        square: uint64 [components], its argument: the number that it is the root of.
        inverse_of_square: uint64 [components].
        id_of_square: the id of a root of which `square` is a multiple, as in sqrt(sqrt(x)).
        used: how many primes exps have used up on the way to it.
        drawn: how many drawn roots it is a product of.
    """

    number: np.ndarray
    inverse: np.ndarray
    square: np.ndarray
    inverse_of_square: np.ndarray
    id_of_square: int
    used: int
    drawn: int = 1


class Square(NamedTuple):
    """The argument of a root.

    Attributes:
        number: uint64 [components].
        used: how many primes exps have used up on the way to it.
        is_power: whether it is a product of exps: a law gives its root.
    """

    number: np.ndarray
    used: int
    is_power: bool


class Multiple(NamedTuple):
    """The root of a number, as a known multiple of a root of this run.

    Attributes:
        id: the id of the root.
        factor: uint64 [components]; None for 1.
    """

    id: int
    factor: np.ndarray | None

    def times(self, factor: np.ndarray, moduli: np.ndarray) -> Multiple:
        """The same, multiplied by a factor."""
        if self.factor is None:
            return self._replace(factor=factor)
        return self._replace(factor=self.factor * factor % moduli)


class Product(NamedTuple):
    """The product of two roots, as a multiple of a root: the product of their numbers times `factor`.

    Attributes:
        factor: uint64 [components].
        id: the id of the root of which it is a multiple.
        degree: the degree of the factor times both roots.
    """

    factor: np.ndarray
    id: int
    degree: Degree


class Roots:
    """The roots that a run has drawn.

    Worked example: sqrt(x) was drawn as h, and then sqrt(4 x) and sqrt(x) sqrt(y) were asked for, where sqrt(y) was
    drawn as k. There are three roots, 1 of x, 2 of y and 3 of x y:

        ids        {h: 1, k: 2, h k: 3}
        by_square  {x: 1, 1/x: 1 / x times 1, 4 x: 2 times 1, y: 2, 1/y: 1 / y times 2, x y: 3, ...}
        products   {(1, 2): 1 times 3}

    Attributes:
        ids: by the residues of a root, its id.
        by_square: by the residues of a number, its root.
        squares: by the residues of a root, its argument.
        products: of two roots, by their ids.
        of_powers: whether a product of exps was taken to a power that is no whole number.
        degree: a bound of the degree of all roots.
        degree_of_squares: a bound of the degree of their arguments.
        degree_of_inverses: a bound of the degree of the inverses of their arguments.
    """

    def __init__(self, moduli: np.ndarray):
        self._moduli = moduli
        ones = np.ones_like(moduli)
        self._roots = [Root(ones, ones, ones, ones, NO_ROOT, used=0, drawn=0)]
        self.ids: dict[bytes, int] = {}
        self.by_square: dict[bytes, Multiple] = {}
        self.squares: dict[bytes, Square] = {}
        self.products: dict[tuple[int, int], Product] = {}
        self.of_powers = False
        self.degree: Degree = CONSTANT
        # Bounds for the argument of one drawn root. The argument of a product of three roots is a product of three.
        self._degree_of_one_square: Degree = CONSTANT
        self._degree_of_one_inverse: Degree = CONSTANT
        self._most_drawn = 1
        # [roots, components] and [roots], of the list above; built when they are asked for.
        self._numbers = np.ones((0, len(moduli)), np.uint64)
        self._corrections = self._numbers
        self._ids_of_squares = np.zeros(0, np.int32)

    def __getitem__(self, id: int) -> Root:
        return self._roots[id]

    @property
    def degree_of_squares(self) -> Degree:
        return self._degree_of_one_square.to_the(self._most_drawn)

    @property
    def degree_of_inverses(self) -> Degree:
        return self._degree_of_one_inverse.to_the(self._most_drawn)

    def add_degree_of_squares(self, degree: Degree) -> None:
        """Adds a bound of the degree of the arguments of more drawn roots."""
        self._degree_of_one_square = self._degree_of_one_square.plus(degree)

    def add_degree_of_inverses(self, degree: Degree) -> None:
        """Adds a bound of the degree of the inverses of these arguments."""
        self._degree_of_one_inverse = self._degree_of_one_inverse.plus(degree)

    def add(self, root: Root, key: bytes, key_of_inverse: bytes) -> int:
        """The id of a new root. Its square and the inverse of that are found by these keys from now on."""
        id = len(self._roots)
        self._roots.append(root)
        self._most_drawn = max(self._most_drawn, root.drawn)
        self.degree = self.degree.plus(Degree(root.drawn))
        self.ids[root.number.tobytes()] = id
        self.by_square.setdefault(key, Multiple(id, None))
        # sqrt(1 / x) is sqrt(x) / x.
        self.by_square.setdefault(key_of_inverse, Multiple(id, root.inverse_of_square))
        return id

    def numbers(self, ids: np.ndarray) -> np.ndarray:
        """uint64 [components, ...]: the roots of ids [...]."""
        self._build_tables()
        return self._take(self._numbers, ids)

    def corrections(self, ids: np.ndarray) -> np.ndarray:
        """uint64 [components, ...]: x / h**2 for each root h of x. It makes c h d h the product c d x."""
        self._build_tables()
        return self._take(self._corrections, ids)

    def ids_of_squares(self, ids: np.ndarray) -> np.ndarray:
        """int32 [...]: the ids of the roots of which the squares of these roots are multiples."""
        self._build_tables()
        return self._ids_of_squares[ids]

    def _take(self, table: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """[components, ...]: the rows [components] of a table."""
        return np.moveaxis(table[ids], -1, 0)

    def _build_tables(self) -> None:
        """Adds the rows of roots that were added since the tables were built."""
        first = len(self._ids_of_squares)
        new_roots = self._roots[first:]
        if not new_roots:
            return
        p = self._moduli
        # [roots, components].
        numbers = np.stack([root.number for root in new_roots])
        inverses = np.stack([root.inverse for root in new_roots])
        squares = np.stack([root.square for root in new_roots])
        corrections = squares * inverses % p * inverses % p
        ids = np.array([root.id_of_square for root in new_roots], np.int32)
        self._numbers = np.concatenate([self._numbers, numbers])
        self._corrections = np.concatenate([self._corrections, corrections])
        self._ids_of_squares = np.concatenate([self._ids_of_squares, ids])
