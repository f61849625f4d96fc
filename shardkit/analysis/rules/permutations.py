"""Invalid permutations: devices named twice or not at all, devices that do not exist."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shardkit._arguments.checks import quoted
from shardkit._jax.jaxprs import find_called_jaxpr, kind_of, marks
from shardkit.analysis.jaxpr.dataflow import split_axes, where
from shardkit.analysis.rules.program import TracedProgram
from shardkit.analysis.rules.rule import Finding


def permutations(program: TracedProgram) -> Iterator[Finding]:
    """Invalid permutations. A shift without wrap and zeros that a `where` replaces are intended."""
    for block, equation in program.equations:
        axes = split_axes(equation, block.context)
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
        elif silent and not _open_shift(pairs, shape) and any(_unmasked(block.jaxpr, equation.outvars)):
            rule = "incomplete-permutation"
            some = quoted(silent[:3]).replace("'", "") + (" and others" if len(silent) > 3 else "")
            message = f"{over} names no source for {some}, which receive zeros."
            remedy = "Name a source for every device, or replace the zeros with jnp.where; shift(wrap=False) is exempt."
        if rule is not None:
            yield Finding(rule, message, where(equation, block.context), remedy)


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


def _unmasked(jaxpr: Any, values: Sequence[Any]) -> list[bool]:
    """Which results of a jaxpr are made of values without a choice (jnp.where) that could replace them."""
    reached = set(values)
    for equation in jaxpr.eqns:
        ins = marks(equation.invars, reached)
        if not any(ins) or (equation.primitive.name == "select_n" and not ins[0]):
            continue
        sub = find_called_jaxpr(equation)
        outs = [True] * len(equation.outvars)
        if sub is not None:
            outs = _unmasked(sub, [v for v, marked in zip(sub.invars, ins, strict=True) if marked])
        reached.update(v for v, marked in zip(equation.outvars, outs, strict=True) if marked)
    return marks(jaxpr.outvars, reached)
