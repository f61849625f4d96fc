"""Makes a pair smaller while what is wrong with it stays: a false proof in its smallest form.

print(shrunk(drawn(23)))     # what does not matter is an input or a constant
"""

import dataclasses
from collections.abc import Callable, Iterator

from support.pairs.language import Node, every, like, named, replaced
from support.pairs.verdicts import Pair, judged

_ROUNDS = 400


def as_wrong(pair: Pair) -> Callable[[Pair], bool]:
    """Whether another pair has the same outcome and the same kind of difference."""
    outcome, kind = judged(pair).outcome, pair.truth()
    return lambda other: other.truth() == kind and judged(other).outcome == outcome


def shrunk(pair: Pair) -> Pair:
    """The smallest pair that is found of which outcome and difference are the same."""
    holds = as_wrong(pair)
    tried, smaller = 0, True
    while smaller and tried < _ROUNDS:
        smaller = False
        for other in _smaller(pair):
            tried += 1
            if tried >= _ROUNDS:
                break
            if holds(other):
                pair, smaller = other, True
                break
    return pair


def _size(pair: Pair) -> int:
    return sum(_weight(node) for node in (*every(pair.kernel), *every(pair.reference)))


def _weight(node: Node) -> int:
    return {"constant": 2, "input": 1}.get(node.op, 4)


def _smaller(pair: Pair) -> Iterator[Pair]:
    """Both sides with a part replaced that stands in both, or one side alone; the largest parts first."""
    size = _size(pair)
    kernel, reference = every(pair.kernel), every(pair.reference)
    alone = (False,) * len(pair.split)
    twins = {str(node): node for node in reference}
    for node in reversed(kernel):
        twin = twins.get(str(node))
        others = dict(_instead(twin, pair, alone)) if twin is not None else {}
        for name, new in _instead(node, pair, pair.split):
            other = replaced(pair.kernel, node, new)
            if twin is not None and name in others:
                yield from _if_smaller(pair, other, replaced(pair.reference, twin, others[name]), size)
            yield from _if_smaller(pair, other, pair.reference, size)
    for node in reversed(reference):
        for _, new in _instead(node, pair, alone):
            yield from _if_smaller(pair, pair.kernel, replaced(pair.reference, node, new), size)


def _if_smaller(pair: Pair, kernel: Node, reference: Node, size: int) -> Iterator[Pair]:
    if kernel.shape == pair.kernel.shape and reference.shape == pair.reference.shape:
        other = dataclasses.replace(pair, kernel=kernel, reference=reference, steps=())
        if _size(other) < size:
            yield other


def _instead(node: Node, pair: Pair, split: tuple[bool, ...]) -> Iterator[tuple[str, Node]]:
    """What may stand in the place of a node, by name: an operand, an input, a constant."""
    if node.op in ("input", "constant"):
        return
    for number, each in enumerate(node.args):
        if each.shape == node.shape and each.kind == node.kind:
            yield f"operand {number}", each
    for number, divided in enumerate(split):
        shape = (pair.shape[0] // pair.devices, pair.shape[1]) if divided else pair.shape
        if node.kind == "f" and shape == node.shape:
            yield f"input {number}", named("input", shape, "f", params=(number,))
    if node.kind == "f":
        yield "one", like(node, 1.0)
        yield "zero", like(node, 0.0)
    elif node.kind == "b":
        yield "true", like(node, True)
