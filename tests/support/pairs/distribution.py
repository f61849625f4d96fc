"""What a program is on several devices: how each value is laid out is drawn, and so are the collectives in between.

A value is "split" by rows, "whole" on every device, or "partial": the sum over the devices is the value.

    kernel, layout = distributed(reduced("sum", x, 0), random.Random(0), devices=2, split=[True])
    # psum(sum(x, 0)), "whole", or by another way: psum_scatter and all_gather, a ring of ppermutes
"""

import random
from collections.abc import Sequence

import numpy as np

from support.pairs.language import (
    Node,
    add,
    along,
    cast,
    compared,
    constant,
    cut,
    gathered,
    index,
    joined,
    like,
    mul,
    named,
    psum,
    reduced,
    resized,
    sent,
    spread,
    sub,
    taken,
    uniform,
    where,
    window,
)

ELEMENTWISE = {
    *("neg", "exp", "log", "abs", "floor", "not", "tanh", "add", "sub", "mul", "div", "max", "min", "and", "or"),
    *("lt", "le", "gt", "ge", "eq", "ne", "where", "cast"),
}
Laid = tuple[Node, str]


def ring(devices: int, by: int = 1) -> list[tuple[int, int]]:
    """The pairs of a ppermute round the ring."""
    return [(i, (i + by) % devices) for i in range(devices)]


def distributed(root: Node, draw: random.Random, devices: int, split: Sequence[bool]) -> Laid:
    """The kernel of a drawn program, and the layout of its result: whole or split."""
    placing = _Placing(draw, devices, split)
    layout = placing.laid(root)[1]
    divides = bool(root.shape) and root.shape[0] % devices == 0
    if layout == "partial":
        layout = "split" if divides and draw.random() < 0.5 else "whole"
    elif layout == "whole" and divides and draw.random() < 0.15:
        layout = "split"
    return placing.at(root, layout), layout


class _Placing:
    def __init__(self, draw: random.Random, devices: int, split: Sequence[bool]):
        self.draw, self.devices, self.split = draw, devices, split
        self.done: dict[int, Laid] = {}
        self.converted: dict[tuple[int, str], Node] = {}

    def laid(self, node: Node) -> Laid:
        """A node on the devices, in the layout that was drawn for it."""
        if id(node) not in self.done:
            self.done[id(node)] = self._made(node)
        return self.done[id(node)]

    def at(self, node: Node, layout: str) -> Node:
        """A node in a layout."""
        if (id(node), layout) not in self.converted:
            self.converted[id(node), layout] = self._converted(node, layout)
        return self.converted[id(node), layout]

    def _divides(self, shape: Sequence[int]) -> bool:
        return bool(shape) and shape[0] % self.devices == 0

    def _local(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (shape[0] // self.devices, *shape[1:])

    # Layouts

    def _converted(self, node: Node, layout: str) -> Node:
        x, own = self.laid(node)
        if own == layout:
            return x
        if own == "partial":
            return self._total(x, layout)
        if layout == "whole":
            return self._whole(x)
        value = uniform(x)
        if value is not None:
            return constant(value, self._local(x.shape), x.kind)
        rows = x.shape[0] // self.devices
        return window(x, self._first_row(rows), rows)

    def _first_row(self, rows: int) -> Node:
        return mul(index(), constant(rows, (), "i"))

    def _whole(self, x: Node) -> Node:
        if x.kind == "f" and self.draw.random() < 0.2:  # each puts its rows in their place among zeros
            rows = constant(np.arange(x.shape[0] * self.devices), (x.shape[0] * self.devices,), "i")
            first = spread(self._first_row(x.shape[0]), rows.shape, ())
            return psum(taken(x, sub(rows, first), "zero"))
        if x.kind == "b":
            return compared("gt", gathered(cast(x, "i"), self.devices), constant(0, self._whole_shape(x), "i"))
        return gathered(x, self.devices)

    def _whole_shape(self, x: Node) -> tuple[int, ...]:
        return resized(x.shape, 0, x.shape[0] * self.devices)

    def _total(self, x: Node, layout: str) -> Node:
        if layout == "split":
            if self.draw.random() < 0.6:
                return named("psum_scatter", self._local(x.shape), x.kind, x)
            rows = x.shape[0] // self.devices
            return window(psum(x), self._first_row(rows), rows)
        choice = self.draw.random()
        if choice < 0.2 and self._divides(x.shape):
            return gathered(named("psum_scatter", self._local(x.shape), x.kind, x), self.devices)
        if choice < 0.35:
            parts = gathered(spread(x, (1, *x.shape), range(1, 1 + len(x.shape))), self.devices)
            return reduced("sum", parts, 0)
        if choice < 0.5 and self.devices == 2:
            return add(x, sent(x, ring(self.devices)))
        return psum(x)

    # Operations

    def _made(self, node: Node) -> Laid:
        if node.op == "input":
            if self.split[node.params[0]]:
                return named("input", self._local(node.shape), "f", params=node.params), "split"
            return node, "whole"
        if node.op == "constant":
            return node, "whole"
        if node.op == "noises":
            return named("noise", self._local(node.shape), "f", index(), params=node.params[:1]), "split"
        if node.op in ELEMENTWISE:
            return self._elementwise(node)
        special = getattr(self, f"_{node.op.replace(' ', '_')}", None)
        if special is not None:
            return special(node)
        dim = node.params[0] if node.op in ("argmax", "sort", "rev", "cut", "joined") else 1 if node.op == "top" else 0
        if dim != 0 and all(self.laid(each)[1] == "split" for each in node.args):
            args = [self.at(each, "split") for each in node.args]
            return named(node.op, self._local(node.shape), node.kind, *args, params=node.params), "split"
        args = [self.at(each, "whole") for each in node.args]
        return named(node.op, node.shape, node.kind, *args, params=node.params), "whole"

    def _elementwise(self, node: Node) -> Laid:
        layouts = [self.laid(each)[1] for each in node.args]
        linear = self._linear(node, layouts)
        if linear is not None and self.draw.random() < 0.5:
            return linear
        splits = "split" in layouts or (self._divides(node.shape) and self.draw.random() < 0.15)
        layout = "split" if splits and self._divides(node.shape) else "whole"
        args = [self.at(each, layout) for each in node.args]
        shape = self._local(node.shape) if layout == "split" else node.shape
        return named(node.op, shape, node.kind, *args, params=node.params), layout

    def _linear(self, node: Node, layouts: list[str]) -> Laid | None:
        """The same of partial sums, where it is linear."""
        parts = [self.laid(each)[0] for each in node.args]
        together = node.op in ("add", "sub", "neg") and set(layouts) == {"partial"}
        known = uniform(parts[1]) if len(parts) == 2 else None
        scaled = node.op in ("mul", "div") and layouts[0] == "partial" and known not in (None, 0.0)
        if (together or scaled) and node.kind == "f":
            return named(node.op, node.shape, node.kind, *parts), "partial"
        return None

    def _sum(self, node: Node) -> Laid:
        x, layout = self.laid(node.args[0])
        [dim] = node.params
        if layout == "split":
            return reduced("sum", x, dim), "partial" if dim == 0 else "split"
        return reduced("sum", x, dim), layout

    def _largest(self, node: Node) -> Laid:
        return self._extreme(node, "pmax")

    def _smallest(self, node: Node) -> Laid:
        return self._extreme(node, "pmin")

    def _extreme(self, node: Node, over: str) -> Laid:
        [dim] = node.params
        if self.laid(node.args[0])[1] != "split":
            return reduced(node.op, self.at(node.args[0], "whole"), dim), "whole"
        x = reduced(node.op, self.at(node.args[0], "split"), dim)
        if dim:
            return x, "split"
        if self.draw.random() < 0.25:
            parts = gathered(spread(x, (1, *x.shape), range(1, 1 + len(x.shape))), self.devices)
            return reduced(node.op, parts, 0), "whole"
        return named(over, x.shape, x.kind, x), "whole"

    def _argmax(self, node: Node) -> Laid:
        x, layout = self.laid(node.args[0])
        [dim] = node.params
        if layout != "split" or dim or self.draw.random() < 0.4:
            if layout == "split" and dim:
                return reduced("argmax", x, dim), "split"
            return reduced("argmax", self.at(node.args[0], "whole"), dim), "whole"
        here, most = reduced("argmax", x, 0), reduced("largest", x, 0)
        place = add(here, spread(self._first_row(x.shape[0]), here.shape, ()))
        none = constant(1000, here.shape, "i")
        place = where(compared("eq", most, named("pmax", most.shape, "f", most)), place, none)
        return named("pmin", place.shape, "i", place), "whole"

    def _spread(self, node: Node) -> Laid:
        dims = node.params[0]
        x, layout = self.laid(node.args[0])
        if dims and dims[0] == 0 and layout == "split":
            return spread(x, self._local(node.shape), dims), "split"
        if 0 not in dims and self._divides(node.shape) and self.draw.random() < 0.6:
            return spread(self.at(node.args[0], "whole"), self._local(node.shape), dims), "split"
        if layout == "partial" and self.draw.random() < 0.4:
            return spread(x, node.shape, dims), "partial"
        return spread(self.at(node.args[0], "whole"), node.shape, dims), "whole"

    def _cumsum(self, node: Node) -> Laid:
        x, layout = self.laid(node.args[0])
        [dim] = node.params
        if layout != "split" or dim:
            whole = x if layout == "split" else self.at(node.args[0], "whole")
            return along("cumsum", whole, dim), "split" if layout == "split" else "whole"
        choice = self.draw.random()
        if choice < 0.3 and len(x.shape) == 2 and x.shape[1] % self.devices == 0:
            return self._turned_over(along("cumsum", self._by_columns(x), 0)), "split"
        if choice < 0.5:
            return along("cumsum", self.at(node.args[0], "whole"), 0), "whole"
        total = reduced("sum", x, 0)
        totals = gathered(spread(total, (1, *total.shape), range(1, 1 + len(total.shape))), self.devices)
        numbers = constant(np.arange(self.devices), (self.devices,), "i")
        earlier = compared("lt", numbers, spread(index(), numbers.shape, ()))
        earlier = spread(earlier, totals.shape, (0,))
        before = reduced("sum", where(earlier, totals, like(totals, 0)), 0)
        return add(along("cumsum", x, 0), spread(before, x.shape, range(1, len(x.shape)))), "split"

    def _sort(self, node: Node) -> Laid:
        x, layout = self.laid(node.args[0])
        [dim] = node.params
        if layout == "split" and dim:
            return along("sort", x, dim), "split"
        if layout == "split" and x.shape[1] % self.devices == 0 and self.draw.random() < 0.6:
            return self._turned_over(along("sort", self._by_columns(x), 0)), "split"
        return along("sort", self.at(node.args[0], "whole"), dim), "whole"

    def _by_columns(self, x: Node) -> Node:
        shape = (x.shape[0] * self.devices, x.shape[1] // self.devices)
        return named("all_to_all", shape, x.kind, x, params=(1, 0))

    def _turned_over(self, x: Node) -> Node:
        shape = (x.shape[0] // self.devices, x.shape[1] * self.devices)
        return named("all_to_all", shape, x.kind, x, params=(0, 1))

    def _shifted(self, node: Node) -> Laid:
        rows = node.shape[0]
        x, layout = self.laid(node.args[0])
        cyclic = node.params[0]
        if layout == "split":
            own = x.shape[0]
            pairs = ring(self.devices) if cyclic else ring(self.devices)[:-1]
            first = sent(cut(x, 0, own - 1, own), pairs)
            return joined([first, cut(x, 0, 0, own - 1)] if own > 1 else [first], 0), "split"
        x = self.at(node.args[0], "whole")
        first = cut(x, 0, rows - 1, rows) if cyclic else constant(0.0, (1, *node.shape[1:]))
        return joined([first, cut(x, 0, 0, rows - 1)], 0), "whole"

    def _taken(self, node: Node) -> Laid:
        x, layout = self.laid(node.args[0])
        at, [outside] = self.at(node.args[1], "whole"), node.params
        inside = at.op == "constant" and bool((at.params[0] < node.args[0].shape[0]).all())
        if layout == "split" and (inside or outside == "zero") and self.draw.random() < 0.6:  # by rows of a vocabulary
            first = spread(self._first_row(x.shape[0]), at.shape, ())
            return taken(x, sub(at, first), "zero"), "partial"
        return taken(self.at(node.args[0], "whole"), at, outside), "whole"

    def _dot(self, node: Node) -> Laid:
        x, layout = self.laid(node.args[0])
        weights = self.at(node.args[1], "whole")
        if layout == "split":
            return named("dot", (x.shape[0], node.shape[1]), "f", x, weights), "split"
        return named("dot", node.shape, "f", self.at(node.args[0], "whole"), weights), "whole"

    def _dot_of_rows(self, node: Node) -> Laid:
        layouts = {self.laid(each)[1] for each in node.args}
        if "split" in layouts:
            return named("dot of rows", node.shape, "f", *(self.at(each, "split") for each in node.args)), "partial"
        return named("dot of rows", node.shape, "f", *(self.at(each, "whole") for each in node.args)), "whole"
