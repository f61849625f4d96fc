"""Invalid permutations: devices named twice or not at all, devices that do not exist."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shardkit._arguments.checks import quoted
from shardkit._jax.dependence import Dependence
from shardkit._jax.jaxprs import kind_of
from shardkit.analysis.jaxpr.dataflow import find_line, find_split_axes
from shardkit.analysis.rules.program import TracedProgram
from shardkit.analysis.rules.rule import Finding


def permutations(program: TracedProgram) -> Iterator[Finding]:
    """Invalid permutations. A shift without wrap and zeros that a `where` replaces are intended."""
    for block, equation in program.equations:
        axes = find_split_axes(equation, block.context)
        if kind_of(equation) != "ppermute" or not axes:
            continue
        shape = [block.context.sizes[a] for a in axes]
        n, pairs = math.prod(shape), [(int(s), int(t)) for s, t in equation.params["perm"]]
        over = f"ppermute over {quoted(axes)} of {n} devices"
        ends = [(what, [pair[i] for pair in pairs]) for i, what in enumerate(("source", "target"))]
        outside = [(what, x) for what, devices in ends for x in devices if not 0 <= x < n]
        twice = [(what, x) for what, devices in ends for x in devices if devices.count(x) > 1] if not outside else []
        silent = sorted(set(range(n)) - {target for _, target in pairs})
        rule = None
        if outside or twice:
            rule, (what, x) = "non-bijective-permutation", (outside or twice)[0]
            message = f"{over} names {what} {x}" + (
                ", a device that does not exist." if outside else " more than once."
            )
            remedy = "Name each device at most once as source and once as target, as shift does."
        elif pairs == [(i, i) for i in range(n)] or (pairs and all(s == t for s, t in pairs)):
            rule, message = "identity-permutation", f"{over} sends every device's value to itself."
            remedy = "Leave it out, or name other targets."
        elif silent and not _open_shift(pairs, shape) and _is_unmasked(block.jaxpr, equation):
            rule = "incomplete-permutation"
            some = quoted(silent[:3]).replace("'", "") + (" and others" if len(silent) > 3 else "")
            message = f"{over} names no source for {some}, which receive zeros."
            remedy = "Name a source for every device, or replace the zeros with jnp.where; shift(wrap=False) is exempt."
        if rule is not None:
            yield Finding(rule, message, find_line(equation, block.context), remedy)


def _open_shift(pairs: Sequence[tuple[int, int]], shape: Sequence[int]) -> bool:
    """Whether all sources shift by the same number of devices, and only those that would leave the axis are missing."""
    n = math.prod(shape)
    for order in itertools.permutations(range(len(shape))):
        joint = np.arange(n).reshape(shape).transpose(order).ravel()  # the device at each joint index in this order
        where = np.argsort(joint)
        steps = {int(where[t] - where[s]) for s, t in pairs}
        if len(steps) == 1 and len(pairs) == n - abs(steps.pop()):
            return True
    return False


class _Unmasked(Dependence):
    """Follows what is made of a result of one equation without a choice (jnp.where) that could replace it."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source = source

    def step(self, equation: Any, operands: list[bool]) -> Sequence[bool]:
        if equation is self.source:
            return [True] * len(equation.outvars)
        return super().step(equation, operands)

    def equation(self, equation: Any, operands: list[bool]) -> Sequence[bool]:
        if equation.primitive.name == "select_n" and not operands[0]:
            return [False]
        return super().equation(equation, operands)


def _is_unmasked(jaxpr: Any, equation: Any) -> bool:
    """Whether results of a jaxpr are made of those of an equation without a choice that could replace them."""
    return any(_Unmasked(equation).run(jaxpr, [False] * len(jaxpr.invars)))
