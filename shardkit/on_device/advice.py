"""What a traced step shows to be unintended: a loss that is another number on each mesh, an axis that does nothing.

`make_train_step` warns of both, and `lint` has a rule for each. jax's varying types say where a value may differ only
if check_vma is on; without it neither is found.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from shardkit._arguments.checks import quoted
from shardkit._jax import compat
from shardkit._jax.jaxprs import called, flow, kind_of, mesh_axes, own_line, source_line, walk
from shardkit._jax.primitives import registered
from shardkit.meshes.layout import all_axes, split_dims

Axes = frozenset[str]
_KEEP = {"convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "copy"}
_SCALE = {"mul", "div", "add", "sub", "max", "neg", "add_any"}
_SUMS = {"reduce_sum", "dot_general"}


class Remark(NamedTuple):
    """What is unintended, the line, and what to do instead."""

    message: str
    source: str
    remedy: str


class _Known(NamedTuple):
    """What is known of a value on one device."""

    differs: Axes = frozenset()  # mesh axes over which it may differ
    total: bool = False  # whether it is a sum over this device's examples, as a number of those that a mask keeps
    # the axes and the line of each division by such a sum that it is linear in
    divided: frozenset[tuple[Axes, str]] = frozenset()


def quotients(jaxpr: Any, sums: int = 1) -> list[Remark]:
    """Sums over devices of what each has divided by a sum over its own examples, over axes of so many sums."""
    found: dict[str, Axes] = {}

    def run(jaxpr: Any, given: Sequence[_Known]) -> list[_Known]:
        return flow(jaxpr, [*[_Known()] * len(jaxpr.constvars), *given], step, lambda _: _Known())

    def step(equation: Any, ins: list[_Known]) -> Sequence[_Known]:
        name, outs = equation.primitive.name, equation.outvars
        inner = [sub for _, sub in compat.inner_jaxprs(equation)]
        if (sub := called(equation)) is not None:
            return run(sub, ins)
        if name == "shard_map":
            run(inner[0], [_Known(all_axes(spec)) for spec in equation.params["in_specs"]])
        axes: Axes = frozenset().union(*(known.differs for known in ins))
        if kind_of(equation) is not None:
            over = frozenset(mesh_axes(equation))
            sent = [each for known in ins for each in known.divided] if kind_of(equation) == "all_reduce" else []
            found.update((line, by & over) for by, line in sent if by & over)
            return [_Known(axes - over if kind_of(equation) != "ppermute" else axes)] * len(outs)
        for sub in inner if name != "shard_map" else ():  # a loop's turns may be examples, each with its own divisor
            run(sub, [_Known(axes)] * len(sub.invars))
        keeps = name in _KEEP or registered(name).cast
        if not keeps and name not in _SCALE | _SUMS | {"select_n", "concatenate"}:
            return [_Known(axes)] * len(outs)
        divided: frozenset[tuple[Axes, str]] = frozenset()
        if name != "dot_general":
            divided = divided.union(*(known.divided for known in ins))
        if name == "div" and ins[1].total:
            divided |= {(ins[1].differs, source_line(equation))}
        total = any(known.total for known in ins) and (keeps or (name in _SCALE and not outs[0].aval.shape))
        sums = name in _SUMS and not outs[0].aval.shape and bool(axes & compat.varying_axes(outs[0].aval))
        return [_Known(axes, total or sums, divided)]

    run(jaxpr, [_Known()] * len(jaxpr.invars))
    times: Counter[str] = Counter()
    for site in walk(jaxpr):
        if kind_of(site.equation) in ("all_reduce", "reduce_scatter"):
            times.update(mesh_axes(site.equation))
    return [
        Remark(
            f"what each device has divided by a sum over its own examples is summed over {quoted(sorted(axes))}: it is "
            "another number on each mesh, unless these sums are equal.",
            line,
            "Return sk.Mean(total, weight) from the loss, or all_reduce the sum before dividing by it.",
        )
        for line, axes in found.items()
        if any(times[axis] >= sums for axis in axes)
    ]


def idle_axes(jaxpr: Any) -> list[Remark]:
    """Axes along which all devices of a program that differentiates do the same, though its pieces divide by them."""
    sizes: dict[str, int] = {}
    used: set[str] = set()
    pieces: set[int] = set()
    backward, source = False, ""
    for site in walk(jaxpr):
        backward |= compat.in_backward(site.equation)
        if not source and (sizes or site.name == "shard_map"):  # of our own step, the first line of the loss in it
            source = own_line(compat.user_frames(site.equation))
        if site.name != "shard_map":
            used |= set(mesh_axes(site.equation)) if not registered(site.name).cast else set()
            continue
        sizes |= dict(site.equation.params["mesh"].shape)
        used |= sizes.keys() - set(compat.manual_axes(site.equation))
        for spec, variable in zip(site.equation.params["in_specs"], site.equation.invars, strict=True):
            used |= all_axes(spec)
            pieces |= {
                variable.aval.shape[dim] // math.prod(sizes[a] for a in axes) for dim, axes in split_dims(spec).items()
            }
    idle = {axis: n for axis, n in sizes.items() if n > 1 and axis not in used and any(p % n == 0 for p in pieces)}
    return [
        Remark(
            f"the {n} devices along axis {axis!r} all do the same work: nothing is split over it and nothing sent.",
            source,
            f"Name it in the plan, as dp(({axis!r}, ...)), or leave it out of the mesh.",
        )
        for axis, n in idle.items()
        if backward
    ]


class Unintended(UserWarning):
    """What the first step says of a program that is right, and not what was meant."""


def warn_of(jaxpr: Any, stacklevel: int) -> None:
    """Warns of all that is unintended in a traced step."""
    # One sum is that of the metrics: a replica that keeps its gradient to itself may have a mean of its own.
    for message, source, remedy in (*quotients(jaxpr, sums=2), *idle_axes(jaxpr)):
        warnings.warn(
            f"step: {source}{': ' if source else ''}{message} {remedy}", Unintended, stacklevel=stacklevel + 1
        )
