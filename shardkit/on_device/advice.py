"""What a traced step shows to be unintended: a loss that is another number on each mesh, an axis that does nothing.

`make_train_step` warns of them, and `lint` has a rule for each. jax's varying types say where a value may differ only
if check_vma is on; without it none is found.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from shardkit._arguments.checks import quoted
from shardkit._jax import compat
from shardkit._jax.jaxprs import MEAN, PLAN, find_called_jaxpr, flow, kind_of, mesh_axes, own_line, source_line, walk
from shardkit._jax.primitives import registered
from shardkit.meshes.layout import all_axes, split_dims

Axes = frozenset[str]
_KEEP = {"convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "copy"}
_SCALE = {"mul", "div", "add", "sub", "max", "neg", "add_any"}
_SUMS = {"reduce_sum", "dot_general"}


class Remark(NamedTuple):
    """The rule of `lint` that names it, what is unintended, the line, and what to do instead."""

    rule: str
    message: str
    source: str
    remedy: str


class _Known(NamedTuple):
    """What is known of a value on one device."""

    differs: Axes = frozenset()  # mesh axes over which it may differ
    reduced: Axes = frozenset()  # those over which the loss made it equal, or cast it, as a share of each device
    given: bool = False  # whether it depends on an argument; if not, it is a constant
    factor: float = math.nan  # of a constant its value, else the product of its known ones; no share is divided off
    total: bool = False  # whether it is a sum over this device's examples, as a number of those that a mask keeps
    # the axes and the line of each division by such a sum that it is linear in
    divided: frozenset[tuple[Axes, str]] = frozenset()
    # what is the same on all devices, and was added to what differs between them: the axes, the line and the factor
    terms: frozenset[tuple[str, Axes, str, float]] = frozenset()


def uncommon_losses(jaxpr: Any, sums: int = 1) -> list[Remark]:
    """What is summed over devices though each has divided it, over axes of so many sums, or all have it alike."""
    found: dict[str, Axes] = {}
    alike: list[Remark] = []
    sizes: dict[str, int] = {}

    def run(jaxpr: Any, given: Sequence[_Known]) -> list[_Known]:
        return flow(jaxpr, [*[_Known()] * len(jaxpr.constvars), *given], step, _literal)

    def step(equation: Any, ins: list[_Known]) -> Sequence[_Known]:
        name, outs = equation.primitive.name, equation.outvars
        inner = [sub for _, sub in compat.inner_jaxprs(equation)]
        if compat.in_scope(equation, MEAN):
            weight, whole = ins
            axes = whole.differs - weight.differs - weight.reduced if weight.given else frozenset()
            divisor = ("the weight", axes, own_line(compat.user_frames(equation)), weight.factor)
            for what, axes, line, factor in (*whole.terms, divisor):
                over = axes & compat.varying_axes(equation.invars[1].aval) & sizes.keys()
                if over and _counts_each_time(factor, weight, math.prod(sizes[axis] for axis in over)):
                    message = (
                        f"{what} of a Mean is the same on all devices along {quoted(sorted(over))}, which sum it: it "
                        "counts once for each of them, unless it is divided by their number."
                    )
                    alike.append(Remark("term-of-each-device", message, line, _ALIKE[what]))
        if (sub := find_called_jaxpr(equation)) is not None:
            return run(sub, ins)
        if name == "shard_map":
            sizes.update({axis: n for axis, n in equation.params["mesh"].shape.items() if n > 1})
            run(inner[0], [_GIVEN._replace(differs=all_axes(spec)) for spec in equation.params["in_specs"]])
            return [_GIVEN] * len(outs)
        over = frozenset(mesh_axes(equation))
        axes = _all(known.differs for known in ins) | (over if name == "axis_index" else _all([]))
        given = any(known.given for known in ins)
        stated = over if registered(name).cast and given and not compat.in_scope(equation, PLAN) else _all([])
        reduced = _all(known.reduced for known in ins) | stated
        every = _Known(axes, reduced, given, 1.0 if given and name != "div" else math.nan)
        if kind_of(equation) is not None:
            sent = [each for known in ins for each in known.divided] if kind_of(equation) == "all_reduce" else []
            found.update((line, by & over) for by, line in sent if by & over)
            if kind_of(equation) != "ppermute":  # a leaf that the plan gathers is as one that every device holds
                reduced = every.reduced if compat.in_scope(equation, PLAN) else every.reduced | over
                every = every._replace(differs=axes - over, reduced=reduced)
            return [every] * len(outs)
        if inner:  # what all turns of a loop share is followed; they may be examples, each with its own divisor
            shared = ins[: compat.scan_parts(equation)[0]] if name == "scan" else []
            for sub in inner:
                own = [every._replace(differs=axes | compat.varying_axes(v.aval)) for v in sub.invars[len(shared) :]]
                run(sub, [*shared, *own])
            return [every._replace(differs=axes | compat.varying_axes(v.aval)) for v in outs]
        keeps = name in _KEEP or registered(name).cast
        if not keeps and name not in _SCALE | _SUMS | {"select_n", "concatenate"}:
            return [every] * len(outs)
        if name != "dot_general":
            every = every._replace(divided=_all(known.divided for known in ins))
        if name == "div" and ins[1].total:
            every = every._replace(divided=every.divided | {(ins[1].differs, source_line(equation))})
        total = any(known.total for known in ins) and (keeps or (name in _SCALE and not outs[0].aval.shape))
        of_examples = name in _SUMS and not outs[0].aval.shape and bool(axes & compat.varying_axes(outs[0].aval))
        return [_with_terms(every._replace(total=total or of_examples), ins, equation)] * len(outs)

    run(jaxpr, [_GIVEN] * len(jaxpr.invars))
    summed = [site.equation for site in walk(jaxpr) if kind_of(site.equation) in ("all_reduce", "reduce_scatter")]
    times = Counter(axis for equation in summed for axis in mesh_axes(equation))
    return alike + [
        Remark(
            "mean-of-quotients",
            f"what each device has divided by a sum over its own examples is summed over {quoted(sorted(axes))}: it is "
            "another number on each mesh, unless these sums are equal.",
            line,
            "Return sk.Mean(total, weight) from the loss, or all_reduce the sum before dividing by it.",
        )
        for line, axes in found.items()
        if any(times[axis] >= sums for axis in axes)
    ]


_ALIKE = {
    "a term of the total": "Weight it, mean.total + mean.weight * term, or return mean + sk.Mean(term, 1).",
    "the weight": "Divide the total by it, and count the examples, sk.Mean(total / value, count).",
}
_GIVEN = _Known(given=True, factor=1.0)


def _literal(atom: Any) -> _Known:
    real = not atom.aval.shape and any(jnp.issubdtype(atom.aval.dtype, kind) for kind in (jnp.floating, jnp.integer))
    return _Known(factor=float(atom.val) if real else math.nan)


def _all(sets: Iterable[frozenset[Any]]) -> frozenset[Any]:
    return frozenset[Any]().union(*sets)


def _with_terms(every: _Known, ins: list[_Known], equation: Any) -> _Known:
    """What is known, with the factor and the terms: a sum of scalars may add one, and a product keeps those it has."""
    name, terms = equation.primitive.name, _all(known.terms for known in ins)
    if name in _KEEP or registered(name).cast or name == "neg" or (name == "reduce_sum" and every.given):
        return every._replace(factor=ins[0].factor, terms=terms)
    if name == "mul":
        kept = _all([]) if all(known.differs for known in ins) else terms
        return every._replace(factor=ins[0].factor * ins[1].factor, terms=kept)
    if name not in ("add", "sub", "add_any"):
        return every
    for whole, own in (ins, ins[::-1]):
        axes = own.differs - whole.differs - whole.reduced
        if axes and whole.given and not equation.outvars[0].aval.shape:
            terms |= {("a term of the total", axes, source_line(equation), whole.factor)}
    return every._replace(factor=ins[0].factor if ins[0].given else ins[1].factor, terms=terms)


def _counts_each_time(factor: float, weight: _Known, n: int) -> bool:
    """Whether a term of this factor is neither weighted nor one of `n` shares, as far as its digits tell."""
    # Beside a constant weight, as 32 examples, 0.0032 may be 32 times 0.0001; 0.0001 is not 32 times 0.000003125.
    d = _digits(factor)
    return 0 < d <= _digits(factor * n) if weight.given else d == 1 and _digits(factor / (weight.factor or 1)) > 2


def _digits(x: float) -> int:
    """The significant digits with which somebody would write a number; 0 of one that is not known."""
    return len(f"{x:.5e}".partition("e")[0].strip("-").replace(".", "").rstrip("0")) if math.isfinite(x) else 0


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
            "idle-axis",
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
    for _, message, source, remedy in (*uncommon_losses(jaxpr, sums=2), *idle_axes(jaxpr)):
        warnings.warn(
            f"step: {source}{': ' if source else ''}{message} {remedy}", Unintended, stacklevel=stacklevel + 1
        )
