"""Identities that are true for all reals: each makes another program of the same function.

    node = same("exp", add(x, y))
    name, other = rewritten(node, random.Random(0))     # "exp of a sum": mul(exp(x), exp(y))

Many hold only of finite values, where 0 * inf and the order of NaN do not come in: `finite` says what surely is.
"""

import dataclasses
import random
from collections.abc import Callable

import numpy as np

from support.pairs.language import (
    INFINITE,
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
    like,
    mul,
    named,
    reduced,
    replaced,
    same,
    spread,
    sub,
    uniform,
    where,
)

FLIPPED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}
OPPOSITE = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}
_KEEPS_POSITIVE = {
    *("sum", "largest", "smallest", "cumsum", "sort", "top", "rev", "spread", "turned", "cut", "joined", "window"),
    *("psum", "pmax", "pmin", "all_gather", "psum_scatter", "all_to_all"),
}


def finite(root: Node) -> bool:
    """Whether a value is a number for all inputs."""
    return all(_stays_finite(node) for node in every(root))


def _stays_finite(node: Node) -> bool:
    if node.op == "constant" and node.kind == "f":
        return bool((np.abs(node.params[0]) < INFINITE).all())
    if node.op == "log":
        return positive(node.args[0])
    if node.op == "div":
        return positive(node.args[1]) or uniform(node.args[1]) not in (None, 0.0)
    return not (node.op == "taken" and node.params[0] == "nan")


def positive(node: Node) -> bool:
    """Whether a value is above zero for all inputs; None of them is looked at."""
    value = uniform(node)
    if value is not None:
        return value > 0
    if node.op == "exp":
        return True
    if node.op in ("add", "max"):
        x, y = node.args
        return (positive(x) and positive(y)) or (positive(x) and least(y)) or (least(x) and positive(y))
    if node.op in ("mul", "div", "min"):
        return all(map(positive, node.args))
    return node.op in _KEEPS_POSITIVE and all(map(positive, node.args))


def least(node: Node) -> bool:
    """Whether a value is never below zero."""
    return node.op == "abs" or positive(node) or (node.op == "mul" and node.args[0] is node.args[1])


Rule = Callable[[Node, random.Random], Node | None]


def _commuted(node: Node, draw: random.Random) -> Node | None:
    if node.op in ("add", "mul", "max", "min", "and", "or"):
        return same(node.op, *reversed(node.args))
    return None


def _regrouped(node: Node, draw: random.Random) -> Node | None:
    if node.op in ("add", "mul", "max", "min") and node.args[0].op == node.op:
        (x, y), z = node.args[0].args, node.args[1]
        return same(node.op, x, same(node.op, y, z))
    return None


def _multiplied_out(node: Node, draw: random.Random) -> Node | None:
    if node.op == "mul" and node.kind == "f" and finite(node):
        for x, y in (node.args, node.args[::-1]):
            if y.op in ("add", "sub"):
                return same(y.op, mul(x, y.args[0]), mul(x, y.args[1]))
    return None


def _difference(node: Node, draw: random.Random) -> Node | None:
    if node.op == "sub" and node.kind == "f":
        x, y = node.args
        return add(x, same("neg", y)) if draw.random() < 0.5 else add(x, mul(y, like(y, -1.0)))
    return None


def _by_inverse(node: Node, draw: random.Random) -> Node | None:
    if node.op == "div" and finite(node):
        x, y = node.args
        return mul(x, div(like(y, 1.0), y))
    return None


def _cancelled(node: Node, draw: random.Random) -> Node | None:
    if node.op == "div" and finite(node):
        x, y = node.args
        return div(mul(x, like(x, 3.0)), mul(y, like(y, 3.0)))
    return None


def _exp_of_a_sum(node: Node, draw: random.Random) -> Node | None:
    if node.op == "exp" and finite(node):
        x = node.args[0]
        if x.op == "add":
            return mul(same("exp", x.args[0]), same("exp", x.args[1]))
        if x.op == "sub":
            return div(same("exp", x.args[0]), same("exp", x.args[1]))
        half = same("exp", mul(x, like(x, 0.5)))
        return mul(half, half)
    return None


def _log_of_a_product(node: Node, draw: random.Random) -> Node | None:
    if node.op != "log" or not finite(node):
        return None
    x = node.args[0]
    if x.op in ("mul", "div") and all(map(positive, x.args)):
        return same("add" if x.op == "mul" else "sub", same("log", x.args[0]), same("log", x.args[1]))
    if x.op == "exp":
        return x.args[0]
    return sub(same("log", mul(x, like(x, 2.0))), same("log", like(x, 2.0)))


def _log_of_exp(node: Node, draw: random.Random) -> Node | None:
    if node.kind == "f" and node.op in ("input", "add", "mul") and finite(node):
        return same("log", same("exp", node))
    return None


def _extreme_by_select(node: Node, draw: random.Random) -> Node | None:
    if node.op in ("max", "min") and node.kind == "f" and finite(node):
        x, y = node.args
        order = draw.choice(["ge", "gt"] if node.op == "max" else ["le", "lt"])
        return where(compared(order, x, y), x, y)
    return None


def _extreme_of_negatives(node: Node, draw: random.Random) -> Node | None:
    other = {"max": "min", "min": "max", "largest": "smallest", "smallest": "largest"}.get(node.op)
    if other is None or node.kind != "f":
        return None
    args = [same("neg", each) for each in node.args]
    return same("neg", dataclasses.replace(node, op=other, args=tuple(args)))


def _absolute(node: Node, draw: random.Random) -> Node | None:
    if node.op == "abs":
        x = node.args[0]
        if draw.random() < 0.5:
            return same("max", x, same("neg", x))
        if finite(x):
            return where(compared("lt", x, like(x, 0.0)), same("neg", x), x)
    return None


def _flipped(node: Node, draw: random.Random) -> Node | None:
    if node.op in FLIPPED:
        x, y = node.args
        return compared(FLIPPED[node.op], y, x)
    return None


def _denied(node: Node, draw: random.Random) -> Node | None:
    if node.op in OPPOSITE and (node.args[0].kind == "i" or finite(node)):
        return same("not", compared(OPPOSITE[node.op], *node.args))
    if node.op == "and":
        x, y = (same("not", each) for each in node.args)
        return same("not", same("or", x, y))
    return None


def _difference_compared(node: Node, draw: random.Random) -> Node | None:
    if node.op in ("lt", "le", "gt", "ge") and node.args[0].kind == "f" and finite(node):
        x, y = node.args
        return compared(node.op, sub(x, y), like(x, 0.0))
    return None


def _scaled_compared(node: Node, draw: random.Random) -> Node | None:
    if node.op in ("lt", "le", "gt", "ge") and node.args[0].kind == "f" and finite(node):
        x, y = node.args
        return compared(node.op, mul(x, like(x, 2.0)), mul(y, like(y, 2.0)))
    return None


def _turned_round(node: Node, draw: random.Random) -> Node | None:
    if node.op == "where":
        mask, x, y = node.args
        return where(same("not", mask), y, x)
    return None


def _nested(node: Node, draw: random.Random) -> Node | None:
    if node.op == "where" and node.args[0].op in ("and", "or"):
        mask, x, y = node.args
        one, other = mask.args
        return where(one, where(other, x, y), y) if mask.op == "and" else where(one, x, where(other, x, y))
    return None


def _by_a_mask(node: Node, draw: random.Random) -> Node | None:
    if node.op == "where" and node.kind == "f" and finite(node):
        mask, x, y = node.args
        ones = cast(mask, "f")
        if uniform(y) == 0.0:
            return mul(ones, x)
        return add(mul(ones, x), mul(sub(like(x, 1.0), ones), y))
    return None


def _by_select(node: Node, draw: random.Random) -> Node | None:
    """x in both branches."""
    if node.kind == "f" and node.op in ("add", "sub", "mul", "exp", "input") and finite(node):
        return where(compared(draw.choice(["lt", "ge"]), node, like(node, draw.choice([0.0, 1.0]))), node, node)
    return None


def _one_branch(node: Node, draw: random.Random) -> Node | None:
    """A branch that the sign of a square, of an exp or of an absolute value takes always."""
    if node.kind == "f" and node.op in ("add", "sub", "mul", "exp", "log", "div") and finite(node):
        x = node if node.op != "div" else node.args[0]
        above = compared("gt", same("exp", x), like(x, 0.0))
        not_below = compared("ge", mul(x, x), like(x, 0.0))
        return where(draw.choice([above, not_below]), node, like(node, 7.0))
    return None


def _sum_by_parts(node: Node, draw: random.Random) -> Node | None:
    if node.op == "sum" and node.args[0].shape[node.params[0]] > 1:
        x, dim = node.args[0], node.params[0]
        at = draw.randrange(1, x.shape[dim])
        first, last = cut(x, dim, 0, at), cut(x, dim, at, x.shape[dim])
        return add(reduced("sum", first, dim), reduced("sum", last, dim))
    return None


def _largest_by_parts(node: Node, draw: random.Random) -> Node | None:
    if node.op in ("largest", "smallest") and node.args[0].shape[node.params[0]] > 1:
        x, dim = node.args[0], node.params[0]
        at = draw.randrange(1, x.shape[dim])
        first, last = cut(x, dim, 0, at), cut(x, dim, at, x.shape[dim])
        return same("max" if node.op == "largest" else "min", reduced(node.op, last, dim), reduced(node.op, first, dim))
    return None


def _sum_of_sums(node: Node, draw: random.Random) -> Node | None:
    if node.op == "sum" and node.kind == "f" and node.args[0].op in ("add", "sub") and finite(node):
        x, y = node.args[0].args
        return same(node.args[0].op, reduced("sum", x, *node.params), reduced("sum", y, *node.params))
    return None


def _sum_in_another_order(node: Node, draw: random.Random) -> Node | None:
    if node.op in ("sum", "largest", "smallest") and node.args[0].shape[node.params[0]] > 1:
        x, dim = node.args[0], node.params[0]
        moved = along("rev", x, dim)
        if x.kind == "f" and finite(x) and draw.random() < 0.5:
            moved = along("sort", x, dim)
        return reduced(node.op, moved, dim)
    return None


def _cumsum_by_a_matrix(node: Node, draw: random.Random) -> Node | None:
    if node.op == "cumsum" and node.kind == "f" and node.params == (0,) and len(node.shape) == 2 and finite(node):
        n = node.shape[0]
        return named("dot", node.shape, "f", constant(np.tril(np.ones((n, n))), (n, n)), node.args[0])
    return None


def _cumsum_unrolled(node: Node, draw: random.Random) -> Node | None:
    if node.op == "cumsum" and node.shape[node.params[0]] > 1:
        x, [dim] = node.args[0], node.params
        rows = [cut(x, dim, 0, 1)]
        for number in range(1, x.shape[dim]):
            rows.append(add(rows[-1], cut(x, dim, number, number + 1)))
        return joined(rows, dim)
    return None


def _scan_unrolled(node: Node, draw: random.Random) -> Node | None:
    if node.op != "scan":
        return None
    x, (body, keep) = node.args[0], node.params
    carry, rows = constant(0.0, (1, *x.shape[1:])), []
    for number in range(x.shape[0]):
        row = cut(x, 0, number, number + 1)
        decayed = mul(carry, like(carry, keep))
        carry = same("max", decayed, row) if body == "max" else add(decayed, row)
        if body == "relu":
            carry = same("max", carry, mul(row, like(row, 0.0)))
        rows.append(carry)
    return joined(rows, 0)


def _scan_by_a_matrix(node: Node, draw: random.Random) -> Node | None:
    if node.op == "scan" and node.params[0] == "sum" and finite(node):
        n, keep = node.shape[0], node.params[1]
        powers = np.subtract.outer(np.arange(n), np.arange(n))
        matrix = np.where(powers >= 0, keep ** np.maximum(powers, 0), 0.0)
        return named("dot", node.shape, "f", constant(matrix, (n, n)), node.args[0])
    return None


def _dot_by_sums(node: Node, draw: random.Random) -> Node | None:
    if node.op == "dot" and finite(node):
        x, y = node.args
        shape = (x.shape[0], x.shape[1], y.shape[1])
        return reduced("sum", mul(spread(x, shape, (0, 1)), spread(y, shape, (1, 2))), 1)
    return None


def _sum_in_front(node: Node, draw: random.Random) -> Node | None:
    """A psum of what each device sums: of the rows first, or of the devices first."""
    if node.op == "psum" and node.args[0].op == "sum":
        x, dim = node.args[0].args[0], node.args[0].params[0]
        return reduced("sum", named("psum", x.shape, x.kind, x), dim)
    return None


def _sent_functions(node: Node, draw: random.Random) -> Node | None:
    """A function of what is sent round a whole ring, or what is sent is that of the function."""
    if node.op in ("ppermute", "all_gather", "all_to_all") and node.args[0].op in ("exp", "neg", "abs", "tanh"):
        if node.op == "ppermute" and len(node.params[0]) < 1 + max(max(pair) for pair in node.params[0] or [(9, 9)]):
            return None
        inner = node.args[0]
        moved = dataclasses.replace(node, args=inner.args)
        return same(inner.op, moved)
    return None


RULES: dict[str, Rule] = {
    "commuted": _commuted,
    "regrouped": _regrouped,
    "multiplied out": _multiplied_out,
    "a difference as a sum": _difference,
    "a quotient by the inverse": _by_inverse,
    "a common factor": _cancelled,
    "exp of a sum": _exp_of_a_sum,
    "log of a product": _log_of_a_product,
    "log of exp": _log_of_exp,
    "max by a select": _extreme_by_select,
    "max of negatives": _extreme_of_negatives,
    "abs": _absolute,
    "a comparison flipped": _flipped,
    "a comparison denied": _denied,
    "a difference compared with 0": _difference_compared,
    "both sides of a comparison doubled": _scaled_compared,
    "branches turned round": _turned_round,
    "nested selects": _nested,
    "a select by a mask": _by_a_mask,
    "the same in both branches": _by_select,
    "a branch that is always taken": _one_branch,
    "a sum by parts": _sum_by_parts,
    "max by parts": _largest_by_parts,
    "a sum of sums": _sum_of_sums,
    "in another order": _sum_in_another_order,
    "cumsum by a matrix": _cumsum_by_a_matrix,
    "cumsum unrolled": _cumsum_unrolled,
    "scan unrolled": _scan_unrolled,
    "scan by a matrix": _scan_by_a_matrix,
    "matmul by sums": _dot_by_sums,
    "devices first": _sum_in_front,
    "a function of what is sent": _sent_functions,
}


def rewritten(root: Node, draw: random.Random) -> tuple[str, Node] | None:
    """One identity, applied at one place; None where none applies."""
    names = draw.sample(sorted(RULES), len(RULES))
    nodes = every(root)
    for name in names[:12]:
        places = [(node, new) for node in nodes if (new := RULES[name](node, draw)) is not None]
        if places:
            node, new = draw.choice(places)
            return name, replaced(root, node, new)
    return None
