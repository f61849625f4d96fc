"""Draws reference programs: plain functions of whole matrices, with what real programs are made of.

`shifted` and `noises` are no operations of the language yet: `plain` says what they are on one device, and
`distribution.distributed` what they are on several.

    drawn = Drawing(random.Random(7), devices=2)
    print(plain(drawn.result()))       # for example: sum(exp(sub(x, spread(largest(x, 1), (4, 3), (0,)))), 0)
"""

import random

import numpy as np

from support.pairs.language import (
    Node,
    add,
    along,
    cast,
    compared,
    constant,
    cut,
    div,
    every,
    joined,
    kept,
    like,
    mul,
    named,
    reduced,
    replaced,
    same,
    spread,
    sub,
    taken,
    where,
)

ROWS = 4
THRESHOLDS = (-2.0, -1.0, -0.5, 0.0, 0.0, 0.5, 1.0, 2.0, 3.0)
FACTORS = (-1.0, 0.25, 0.5, 2.0, 3.0, 0.1)
ORDER = ("lt", "le", "gt", "ge")


class Drawing:
    """Draws the nodes of one program.

    Attributes:
        draw: the source of chance.
        devices: how many the kernel will have; they divide what is split.
        columns: the width of all matrices.
        inputs: the nodes of the inputs.
    """

    def __init__(self, draw: random.Random, devices: int):
        self.draw, self.devices = draw, devices
        self.columns = draw.choice([1, 2, 3, 4])
        self.shape = (ROWS, self.columns)
        count = draw.choice([1, 1, 2, 2, 3])
        self.inputs = [named("input", self.shape, "f", params=(number,)) for number in range(count)]
        self.smooth = draw.random() < 0.15  # without comparisons

    def result(self) -> Node:
        """A program: a matrix, or what is left of it after sums."""
        result = self.matrix(self.draw.choice([1, 1, 2, 2, 2, 3, 3]))
        end = self.draw.random()
        if end < 0.35:
            return result
        over = "sum" if self.smooth or end < 0.8 else self.draw.choice(["largest", "smallest"])
        result = reduced(over, result, self.draw.choice([0, 0, 1]))
        return reduced("sum", result, 0) if end > 0.6 else result

    def matrix(self, depth: int) -> Node:
        """Any floats."""
        if depth <= 0:
            return self._leaf()
        kinds = [
            (self._ring, 5), (self._quotient, 2), (self._function, 3), (self._normalized, 3), (self._moved, 3),
            (self._accumulated, 2),
        ]  # fmt: skip
        if not self.smooth:
            kinds += [
                (self._ordered, 4), (self._selected, 4), (self._guarded, 3), (self._masked, 3), (self._counted, 2),
                (self._rounded, 2), (self._ranked, 2), (self._gate, 2),
            ]  # fmt: skip
        [made] = self.draw.choices([f for f, _ in kinds], [weight for _, weight in kinds])
        return made(depth)

    def positive(self, depth: int) -> Node:
        """Floats that are above zero for all inputs."""
        x = self.matrix(depth - 1)
        choice = self.draw.randrange(3)
        if choice == 0:
            return same("exp", x)
        if choice == 1 or self.smooth:
            return add(mul(x, x), like(x, self.draw.choice([0.5, 1.0, 2.0])))
        return add(same("abs", x), like(x, 1.0))

    def mask(self, depth: int) -> Node:
        """Booleans: of a comparison, of two, or known."""
        choice = self.draw.random()
        if choice < 0.2 or depth <= 0:
            return self.known_mask()
        if choice < 0.65:
            x = self.matrix(depth - 1) if self.draw.random() < 0.7 else self.positive(depth - 1)
            return compared(self.draw.choice(ORDER), x, like(x, self.draw.choice(THRESHOLDS)))
        if choice < 0.8:
            return compared(self.draw.choice(ORDER), self.matrix(depth - 1), self.matrix(depth - 1))
        if choice < 0.9:
            x, low = self.matrix(depth - 1), self.draw.choice(THRESHOLDS)
            high = low + self.draw.choice([0.5, 1.0, 2.0])
            return same("and", compared("gt", x, like(x, low)), compared("lt", x, like(x, high)))
        return same(self.draw.choice(["and", "or"]), self.mask(depth - 1), self.mask(depth - 1))

    def known_mask(self) -> Node:
        """The first rows or columns, or any places."""
        choice = self.draw.randrange(3)
        places = np.indices(self.shape)
        if choice == 0:
            return constant(places[0] < self.draw.randrange(1, ROWS + 1), self.shape, "b")
        if choice == 1:
            return constant(places[1] < self.draw.randrange(1, self.columns + 1), self.shape, "b")
        bits = [self.draw.random() < 0.6 for _ in range(ROWS * self.columns)]
        return constant(np.reshape(bits, self.shape), self.shape, "b")

    # Kinds of matrices

    def _leaf(self) -> Node:
        if self.draw.random() < 0.85:
            return self.draw.choice(self.inputs)
        if self.draw.random() < 0.2:
            return named("noises", self.shape, "f", params=(self.draw.randrange(3), self.devices))
        return constant(self.draw.choice(FACTORS), self.shape)

    def _ring(self, depth: int) -> Node:
        x = self.matrix(depth - 1)
        choice = self.draw.randrange(5)
        if choice == 0:
            return mul(x, like(x, self.draw.choice(FACTORS)))
        if choice == 1:
            return mul(x, x)
        return same(self.draw.choice(["add", "sub", "mul"]), x, self.matrix(depth - 1))

    def _quotient(self, depth: int) -> Node:
        below = self.positive(depth - 1) if self.draw.random() < 0.8 else self.matrix(depth - 1)
        return div(self.matrix(depth - 1), below)

    def _function(self, depth: int) -> Node:
        choice = self.draw.random()
        if choice < 0.4:
            return same("exp", self.matrix(depth - 1))
        if choice < 0.75:
            return same("log", self.positive(depth - 1))
        if choice < 0.85:
            return same("log", self.matrix(depth - 1))
        return same("tanh", self.matrix(depth - 1))

    def _normalized(self, depth: int) -> Node:
        """Less or by a sum over rows or columns: means, softmax, logsumexp."""
        x, dim = self.matrix(depth - 1), self.draw.randrange(2)
        choice = self.draw.randrange(4)
        if choice == 0:
            total = kept(reduced("sum", x, dim), self.shape, dim)
            return sub(x, mul(total, like(x, 1 / self.shape[dim])))
        if choice == 1 and not self.smooth:
            x = sub(x, kept(reduced("largest", x, dim), self.shape, dim))
        powers = same("exp", x)
        total = kept(reduced("sum", powers, dim), self.shape, dim)
        return same("log", total) if choice == 2 else div(powers, total)

    def _moved(self, depth: int) -> Node:
        x = self.matrix(depth - 1)
        choice = self.draw.randrange(4)
        if choice == 0:
            return named("shifted", self.shape, "f", x, params=(self.draw.random() < 0.3,))
        if choice == 1:
            return along("rev", x, self.draw.randrange(2))
        last = ROWS + (self.draw.random() < 0.4)
        at = constant([self.draw.randrange(last) for _ in range(ROWS)], (ROWS,), "i")
        if choice == 2:
            return taken(x, at, self.draw.choice(["zero", "nearest"]))
        rows = taken(x, at, "nan")
        if self.draw.random() < 0.8:  # what is out of bounds is left out
            inside = spread(constant(at.params[0] < ROWS, (ROWS,), "b"), self.shape, (0,))
            return where(inside, rows, like(rows, 0.0))
        return rows

    def _accumulated(self, depth: int) -> Node:
        x = self.matrix(depth - 1)
        choice = self.draw.randrange(4)
        if choice == 0:
            return along("cumsum", x, self.draw.randrange(2))
        if choice == 1:
            body = "sum" if self.smooth else self.draw.choice(["sum", "relu", "max"])
            return named("scan", self.shape, "f", x, params=(body, self.draw.choice([0.5, 1.0])))
        if choice == 2:
            matrix = [self.draw.choice([-1.0, 0.0, 0.5, 1.0, 2.0]) for _ in range(self.columns**2)]
            weights = constant(np.reshape(matrix, (self.columns,) * 2), (self.columns,) * 2)
            return named("dot", self.shape, "f", x, weights)
        product = named("dot of rows", (self.columns,) * 2, "f", x, self.matrix(depth - 2))
        return named("dot", self.shape, "f", x, product)

    def _ordered(self, depth: int) -> Node:
        x = self.matrix(depth - 1)
        choice = self.draw.randrange(5)
        if choice == 0:
            return same("max", x, like(x, 0.0))
        if choice == 1:
            return same("abs", x)
        if choice == 2:
            low = self.draw.choice(THRESHOLDS)
            return same("min", same("max", x, like(x, low)), like(x, low + 1))
        if choice == 3:
            return same(self.draw.choice(["max", "min"]), x, self.matrix(depth - 1))
        dim = self.draw.randrange(2)
        return kept(reduced(self.draw.choice(["largest", "smallest"]), x, dim), self.shape, dim)

    def _selected(self, depth: int) -> Node:
        other = self.matrix(depth - 1) if self.draw.random() < 0.6 else constant(0.0, self.shape)
        return where(self.mask(depth - 1), self.matrix(depth - 1), other)

    def _guarded(self, depth: int) -> Node:
        """A quotient or a logarithm where it has a meaning, else zero."""
        x = self.matrix(depth - 1)
        choice = self.draw.randrange(3)
        if choice == 0:  # x log x of what may be zero
            x = same("max", x, like(x, 0.0))
            return where(compared("gt", x, like(x, 0.0)), mul(x, same("log", x)), like(x, 0.0))
        mask = compared("gt", x, like(x, 0.0)) if choice == 1 else self.known_mask()
        inside = where(mask, x, like(x, 1.0)) if choice == 1 else where(mask, self.positive(depth - 1), like(x, 0.0))
        what = same("log", inside) if self.draw.random() < 0.5 else div(self.matrix(depth - 2), inside)
        return where(mask, what, like(x, 0.0))

    def _masked(self, depth: int) -> Node:
        """A softmax, maximum or mean of some places."""
        x, mask, dim = self.matrix(depth - 1), self.mask(depth - 1), 1
        choice = self.draw.randrange(3)
        if choice == 0:
            zeros = where(mask, x, like(x, 0.0))
            count = reduced("sum", cast(mask, "i"), 0)
            count = same("max", cast(count, "f"), constant(1.0, count.shape))
            return kept(div(reduced("sum", zeros, 0), count), self.shape, 0)
        lowest = where(mask, x, like(x, self.draw.choice([-np.inf, -1e30])))
        if choice == 1:
            return same("max", kept(reduced("largest", lowest, dim), self.shape, dim), like(x, -1.0))
        powers = same("exp", lowest)
        total = kept(reduced("sum", powers, dim), self.shape, dim)
        return div(powers, total)

    def _counted(self, depth: int) -> Node:
        """How many places: by rows, by columns, or of all."""
        count = cast(self.mask(depth - 1), "i")
        dim = self.draw.randrange(2)
        total = kept(reduced("sum", count, dim), self.shape, dim)
        if self.draw.random() < 0.3:
            total = along("cumsum", count, dim)
        return mul(cast(total, "f"), self.matrix(depth - 2))

    def _rounded(self, depth: int) -> Node:
        x = self.matrix(depth - 1)
        whole = same("floor", x) if self.draw.random() < 0.7 else cast(cast(x, "i"), "f")
        choice = self.draw.randrange(3)
        if choice == 0:
            return whole
        number = like(x, float(self.draw.randrange(-1, 4)))
        mask = compared(self.draw.choice(["eq", "ne", "lt", "ge"]), whole, number)
        return where(mask, self.matrix(depth - 2), like(x, 0.0))

    def _ranked(self, depth: int) -> Node:
        """By the order of rows or columns: sorted, the first alone, those that are among the largest."""
        x, dim = self.matrix(depth - 1), self.draw.randrange(2)
        choice = self.draw.randrange(4)
        if choice == 3:
            return taken(x, self._row(x, depth), self.draw.choice(["zero", "nearest", "nan"]))
        if choice == 0:
            return mul(along("sort", x, dim), self.matrix(depth - 2))
        if choice == 1:
            first = kept(reduced("argmax", x, dim), self.shape, dim)
            places = constant(np.indices(self.shape)[dim], self.shape, "i")
            return where(compared("eq", first, places), self.matrix(depth - 2), like(x, 0.0))
        k = self.draw.randrange(1, self.columns + 1)
        largest = named("top", (ROWS, k), "f", x, params=(k,))
        least = kept(reduced("smallest", largest, 1), self.shape, 1)
        return where(compared("ge", x, least), self.matrix(depth - 2), like(x, 0.0))

    def _row(self, x: Node, depth: int) -> Node:
        """The number of a row that values decide: by an argmax, a count or a cast."""
        choice = self.draw.random()
        if choice < 0.5:
            return reduced("argmax", x, 1)
        if choice < 0.9:
            return reduced("sum", cast(self.mask(depth - 1), "i"), 1)
        return cast(reduced("sum", x, 1), "i")

    def _gate(self, depth: int) -> Node:
        """A branch that hangs on what is known to be positive."""
        x = self.positive(depth - 1)
        if self.draw.random() < 0.3:
            x = div(x, kept(reduced("sum", x, 1), self.shape, 1))
        mask = compared(self.draw.choice(ORDER), x, like(x, self.draw.choice([0.0, 0.25, 0.5, 1.0, 2.0])))
        return where(mask, self.matrix(depth - 2), like(x, 0.0))


def plain(root: Node) -> Node:
    """A drawn program in the language, on one device."""
    for node in every(root):
        if node.op == "shifted":
            [x] = node.args
            rows = node.shape[0]
            first = cut(x, 0, rows - 1, rows) if node.params[0] else constant(0.0, (1, *node.shape[1:]))
            new = joined([first, cut(x, 0, 0, rows - 1)], 0)
        elif node.op == "noises":
            key, parts = node.params
            shape = (node.shape[0] // parts, *node.shape[1:])
            rows_of = [named("noise", shape, "f", constant(i, (), "i"), params=(key,)) for i in range(parts)]
            new = joined(rows_of, 0)
        else:
            continue
        return plain(replaced(root, node, new))
    return root
