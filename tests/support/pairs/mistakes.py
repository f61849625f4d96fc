"""One mistake, planted in a kernel: what people forget, swap or take for another thing.

    name, wrong = planted(kernel, random.Random(0))     # for example "a sum over devices is missing"

Whether it changes the function is not known here: `support.pairs.truth` evaluates both.
"""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from support.pairs.distribution import ring
from support.pairs.language import (
    Node,
    add,
    cast,
    compared,
    constant,
    every,
    like,
    mul,
    named,
    psum,
    replaced,
    same,
    uniform,
    where,
)
from support.pairs.rewrites import OPPOSITE

LOOSER = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ge", "ne": "gt"}
Mistake = Callable[[Node, random.Random, int], Node | None]


def _with(node: Node, **changes: Any) -> Node:
    return dataclasses.replace(node, **changes)


def _other_constant(node: Node, draw: random.Random, devices: int) -> Node | None:
    value = uniform(node)
    if node.kind != "f" or value is None or not np.isfinite(value):
        return None
    others = [value + 1, -value, 2 * value, value * 1.0001, 0.0, 1.0]
    return like(node, draw.choice([each for each in others if each != value]))


def _other_threshold(node: Node, draw: random.Random, devices: int) -> Node | None:
    if node.op in OPPOSITE and node.args[1].op == "constant" and node.args[1].kind == "f":
        x, limit = node.args
        value = float(limit.params[0].flat[0])
        return compared(node.op, x, like(x, value + draw.choice([-1.0, -0.5, 0.25, 0.5, 1.0, 2.0])))
    return None


def _ties(node: Node, draw: random.Random, devices: int) -> Node | None:
    return _with(node, op=LOOSER[node.op]) if node.op in LOOSER else None


def _opposite(node: Node, draw: random.Random, devices: int) -> Node | None:
    return _with(node, op=OPPOSITE[node.op]) if node.op in OPPOSITE else None


def _swapped(node: Node, draw: random.Random, devices: int) -> Node | None:
    if node.op == "where":
        mask, x, y = node.args
        return where(mask, y, x)
    return None


def _arguments(node: Node, draw: random.Random, devices: int) -> Node | None:
    return same(node.op, *reversed(node.args)) if node.op in ("sub", "div") else None


def _guard_dropped(node: Node, draw: random.Random, devices: int) -> Node | None:
    return draw.choice([node.args[1], node.args[1], node.args[2]]) if node.op == "where" else None


def _guard_by_a_mask(node: Node, draw: random.Random, devices: int) -> Node | None:
    """Zeros by a product: 0 * inf and 0 * NaN are no zeros."""
    if node.op == "where" and node.kind == "f" and uniform(node.args[2]) == 0.0:
        return mul(cast(node.args[0], "f"), node.args[1])
    return None


def _condition_dropped(node: Node, draw: random.Random, devices: int) -> Node | None:
    return draw.choice(node.args) if node.op in ("and", "or") else None


def _and_or(node: Node, draw: random.Random, devices: int) -> Node | None:
    return _with(node, op="or" if node.op == "and" else "and") if node.op in ("and", "or") else None


def _mask_off_by_one(node: Node, draw: random.Random, devices: int) -> Node | None:
    if node.op == "constant" and node.kind == "b" and node.shape:
        return _with(node, params=(np.roll(node.params[0], 1, draw.randrange(len(node.shape))),))
    return None


def _place_off_by_one(node: Node, draw: random.Random, devices: int) -> Node | None:
    if node.op == "constant" and node.kind == "i":
        return _with(node, params=(node.params[0] + draw.choice([-1, 1]),))
    return None


def _rows_elsewhere(node: Node, draw: random.Random, devices: int) -> Node | None:
    if node.op == "taken" and node.args[1].op == "constant" and node.args[1].shape:
        at = node.args[1].params[0].copy()
        at.flat[draw.randrange(at.size)] = draw.randrange(node.args[0].shape[0] + 1)
        return _with(node, args=(node.args[0], constant(at, at.shape, "i")))
    return None


def _out_of_bounds(node: Node, draw: random.Random, devices: int) -> Node | None:
    if node.op == "taken":
        others = [each for each in ("nan", "zero", "nearest") if each != node.params[0]]
        return _with(node, params=(draw.choice(others),))
    return None


def _missing_collective(node: Node, draw: random.Random, devices: int) -> Node | None:
    return node.args[0] if node.op in ("psum", "pmax", "pmin", "ppermute") and devices > 1 else None


def _extra_collective(node: Node, draw: random.Random, devices: int) -> Node | None:
    if devices > 1 and node.kind in "fi" and node.op not in ("constant", "psum", "pmax", "pmin", "axis_index"):
        return psum(node) if draw.random() < 0.6 else named("pmax", node.shape, node.kind, node)
    return None


def _other_collective(node: Node, draw: random.Random, devices: int) -> Node | None:
    others = {"psum": ["pmax", "pmin"], "pmax": ["psum", "pmin"], "pmin": ["pmax"]}.get(node.op)
    return _with(node, op=draw.choice(others)) if others and devices > 1 else None


def _own_piece(node: Node, draw: random.Random, devices: int) -> Node | None:
    """Its own rows, again and again, instead of those of all."""
    if node.op == "all_gather" and devices > 1:
        return named("joined", node.shape, node.kind, *[node.args[0]] * devices, params=(0,))
    return None


def _count_of_one_device(node: Node, draw: random.Random, devices: int) -> Node | None:
    return node.args[0] if node.op == "psum" and node.kind == "i" and devices > 1 else None


def _wrong_pair(node: Node, draw: random.Random, devices: int) -> Node | None:
    if node.op != "ppermute" or devices < 2:
        return None
    pairs = list(node.params[0])
    choice = draw.randrange(3)
    if choice == 0 and pairs:
        pairs.pop(draw.randrange(len(pairs)))
    elif choice == 1 and len(pairs) < devices:
        pairs = ring(devices)
    else:
        pairs = [(end, start) for start, end in pairs] if devices > 2 else [(i, i) for i in range(devices)]
    return _with(node, params=(tuple(pairs),))


def _wrong_index(node: Node, draw: random.Random, devices: int) -> Node | None:
    if node.op != "axis_index" or devices < 2:
        return None
    if draw.random() < 0.5:
        return constant(0, (), "i")
    return add(constant(devices - 1, (), "i"), mul(node, constant(-1, (), "i")))


def _key_reused(node: Node, draw: random.Random, devices: int) -> Node | None:
    if node.op == "noise":
        return _with(node, args=(constant(0, (), "i"),))
    return None


def _wrong_dim(node: Node, draw: random.Random, devices: int) -> Node | None:
    if node.op in ("cumsum", "sort", "rev") and len(node.shape) == 2:
        return _with(node, params=(1 - node.params[0],))
    if node.op in ("sum", "largest", "smallest", "argmax") and _square(node.args[0]):
        return _with(node, params=(1 - node.params[0],))
    if node.op == "spread" and len(node.args[0].shape) == 1 and _square(node):
        return _with(node, params=((1 - node.params[0][0],),))
    return None


def _square(node: Node) -> bool:
    return len(node.shape) == 2 and node.shape[0] == node.shape[1]


def _other_operation(node: Node, draw: random.Random, devices: int) -> Node | None:
    others = {
        "add": ["sub", "max"], "sub": ["add"], "mul": ["add", "div"], "div": ["mul"], "max": ["min", "add"],
        "min": ["max"], "largest": ["smallest", "sum"], "smallest": ["largest"], "sum": ["largest"],
    }.get(node.op)  # fmt: skip
    if not others or node.kind != "f":
        return None
    return _with(node, op=draw.choice(others))


def _function_dropped(node: Node, draw: random.Random, devices: int) -> Node | None:
    if node.op in ("exp", "log", "abs", "floor", "neg", "tanh", "not", "cumsum", "sort", "rev"):
        return node.args[0]
    return None


def _other_rounding(node: Node, draw: random.Random, devices: int) -> Node | None:
    """Towards zero, or down."""
    if node.op == "floor":
        return cast(cast(node.args[0], "i"), "f")
    if node.op == "cast" and node.kind == "f" and node.args[0].op == "cast" and node.args[0].args[0].kind == "f":
        return same("floor", node.args[0].args[0])
    return None


def _other_scan(node: Node, draw: random.Random, devices: int) -> Node | None:
    if node.op != "scan":
        return None
    body, keep = node.params
    if draw.random() < 0.5:
        return _with(node, params=(body, 1.5 - keep))
    return _with(node, params=(draw.choice([each for each in ("sum", "relu", "max") if each != body]), keep))


def _fewer(node: Node, draw: random.Random, devices: int) -> Node | None:
    """One of the largest less."""
    if node.op == "top" and node.params[0] > 1:
        k = node.params[0] - 1
        rest = _with(node, params=(k,), shape=(*node.shape[:-1], k))
        return named("joined", node.shape, "f", *[rest, like(_first(rest), 1e3)], params=(1,))
    return None


def _first(node: Node) -> Node:
    return named("cut", (*node.shape[:-1], 1), "f", node, params=(1, 0, 1))


def _times_nothing(node: Node, draw: random.Random, devices: int) -> Node | None:
    """Added with the weight zero: nothing, unless it is infinite or no number."""
    if node.kind == "f" and node.op in ("exp", "log", "div", "sub", "where", "sum"):
        other = same("log", like(node, 0.0)) if draw.random() < 0.3 else same("log", node)
        return add(node, mul(like(node, 0.0), other))
    return None


def _branch_behind_a_positive(node: Node, draw: random.Random, devices: int) -> Node | None:
    """Another value where something positive is beyond a threshold."""
    if node.kind == "f" and node.op in ("mul", "add", "exp", "div", "sum", "where"):
        x = draw.choice([same("exp", node), mul(node, node), same("abs", node)])
        mask = compared(draw.choice(["lt", "gt"]), x, like(x, draw.choice([0.25, 0.5, 1.0, 2.0])))
        return where(mask, node, mul(node, like(node, 2.0)))
    return None


MISTAKES: dict[str, Mistake] = {
    "another constant": _other_constant,
    "another threshold": _other_threshold,
    "> for >=": _ties,
    "the opposite comparison": _opposite,
    "branches swapped": _swapped,
    "arguments swapped": _arguments,
    "a guard dropped": _guard_dropped,
    "a mask for a guard": _guard_by_a_mask,
    "a condition dropped": _condition_dropped,
    "and for or": _and_or,
    "a mask off by one": _mask_off_by_one,
    "a place off by one": _place_off_by_one,
    "rows elsewhere": _rows_elsewhere,
    "another value out of bounds": _out_of_bounds,
    "a collective is missing": _missing_collective,
    "a collective too many": _extra_collective,
    "another collective": _other_collective,
    "its own piece": _own_piece,
    "the count of one device": _count_of_one_device,
    "a wrong pair": _wrong_pair,
    "a wrong index": _wrong_index,
    "a key reused": _key_reused,
    "a wrong dim": _wrong_dim,
    "another operation": _other_operation,
    "a function dropped": _function_dropped,
    "another rounding": _other_rounding,
    "another scan": _other_scan,
    "one less of the largest": _fewer,
    "zero times what may be infinite": _times_nothing,
    "a branch behind a positive": _branch_behind_a_positive,
}
# Of which a proof has more to fear: thresholds, guards, what devices do not receive.
LIKELY = ("another threshold", "> for >=", "a guard dropped", "a mask for a guard", "a wrong pair", "rows elsewhere")


def planted(root: Node, draw: random.Random, devices: int) -> tuple[str, Node] | None:
    """One mistake at one place; None where none applies."""
    nodes = every(root)
    names = [*sorted(MISTAKES), *LIKELY, *LIKELY]
    for name in draw.sample(names, len(names)):
        places = [(node, new) for node in nodes if (new := MISTAKES[name](node, draw, devices)) is not None]
        if places:
            node, new = draw.choice(places)
            return name, replaced(root, node, new)
    return None
