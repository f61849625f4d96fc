"""Invalid permutations: devices named twice or not at all, devices that do not exist."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardkit._arguments.checks import quote
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
        # A pair counts devices over all axes together: of sizes 2 and 4, device 5 is (1, 1).
        shape = [block.context.sizes[axis] for axis in axes]
        problem = _find_problem(block.jaxpr, equation, axes, shape)
        if problem is not None:
            yield Finding(problem.rule, problem.message, find_line(equation, block.context), problem.remedy)


class _Problem(NamedTuple):
    """The rule that a permutation breaks, how, and what to do instead."""

    rule: str
    message: str
    remedy: str


def _find_problem(jaxpr: Any, equation: Any, axes: tuple[str, ...], shape: Sequence[int]) -> _Problem | None:
    n = math.prod(shape)
    pairs = []
    for source, target in equation.params["perm"]:
        pairs.append((int(source), int(target)))
    subject = f"ppermute over {quote(axes)} of {n} devices"
    wrong = _find_wrong_device(pairs, n)
    if wrong:
        remedy = "Name each device at most once as source and once as target, as shift does."
        return _Problem("non-bijective-permutation", f"{subject} names {wrong}", remedy)
    if pairs and all(source == target for source, target in pairs):
        message = f"{subject} sends every device's value to itself."
        return _Problem("identity-permutation", message, "Leave it out, or name other targets.")
    # jax gives zeros to a device that nobody sends to. They are meant in a shift without wrap, where the edge of a
    # domain receives nothing, and where a jnp.where puts something else in their place.
    targets = {target for _, target in pairs}
    without_source = sorted(set(range(n)) - targets)
    if without_source and not _is_open_shift(pairs, shape) and _is_unmasked(jaxpr, equation):
        devices = ", ".join(str(device) for device in without_source[:3])
        if len(without_source) > 3:
            devices += " and others"
        remedy = "Name a source for every device, or replace the zeros with jnp.where; shift(wrap=False) is exempt."
        message = f"{subject} names no source for {devices}, which receive zeros."
        return _Problem("incomplete-permutation", message, remedy)
    return None


def _find_wrong_device(pairs: Sequence[tuple[int, int]], n: int) -> str:
    """The first device that is named and does not exist, else the first that is named twice; "" if there is none."""
    roles: dict[str, list[int]] = {"source": [], "target": []}
    for source, target in pairs:
        roles["source"].append(source)
        roles["target"].append(target)
    for role, devices in roles.items():
        for device in devices:
            if not 0 <= device < n:
                return f"{role} {device}, a device that does not exist."
    for role, devices in roles.items():
        counts = Counter(devices)
        for device in devices:
            if counts[device] > 1:
                return f"{role} {device} more than once."
    return ""


def _is_open_shift(pairs: Sequence[tuple[int, int]], shape: Sequence[int]) -> bool:
    """Whether all sources shift by the same number of devices, and only those that would leave the axis are missing.

    For example on 4 devices (0, 1), (1, 2), (2, 3) is a shift by 1 in which only device 3 would leave.
    """
    n = math.prod(shape)
    # Over several axes a shift may count the devices in any order of them.
    for order in itertools.permutations(range(len(shape))):
        # Of shape (2, 4) in the order (1, 0) the places have the devices 0, 4, 1, 5, 2, 6, 3, 7: the pairs (0, 4) and
        # (4, 1) are both steps of 1.
        devices = np.arange(n).reshape(shape).transpose(order).ravel()  # the device at each place of this order
        place_of = np.argsort(devices)
        steps = {int(place_of[target] - place_of[source]) for source, target in pairs}
        if len(steps) == 1 and len(pairs) == n - abs(steps.pop()):
            return True
    return False


class _Unmasked(Dependence):
    """Follows the results of one equation, up to a choice (jnp.where) that could replace them."""

    def __init__(self, source: Any) -> None:
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
    """Whether results of a jaxpr depend on an equation's result without a `where` that could replace it."""
    return any(_Unmasked(equation).run(jaxpr, [False] * len(jaxpr.invars)))
