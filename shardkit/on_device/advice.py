"""Mistakes that a traced step shows: a loss that is another number on each mesh, a mesh axis that does nothing.

`make_train_step` warns of them, and `lint` has a rule for each. They are read from jax's varying types, which say over
which axes a value may differ: without check_vma there are no types, and no mistake is noticed.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from shardkit._arguments.checks import quote
from shardkit._jax import compat
from shardkit._jax.interpreter import JaxprInterpreter, scan_operands
from shardkit._jax.jaxprs import MEAN, PLAN, kind_of, mesh_axes, own_line, source_line, walk
from shardkit._jax.primitives import SUMS, VIEWS, registered
from shardkit.meshes.layout import all_axes, split_dims

Axes = frozenset[str]
_SCALE = {"mul", "div", "add", "sub", "max", "neg", "add_any"}
_CONTRACTIONS = {"reduce_sum", "dot_general"}


class Remark(NamedTuple):
    """A mistake: the rule of `lint` that names it, what is unintended, the line, and what to do instead."""

    rule: str
    message: str
    source: str
    remedy: str


class _Quotient(NamedTuple):
    """A division by a sum over this device's examples."""

    axes: Axes  # over which the sum differs
    line: str


class _Term(NamedTuple):
    """What is the same on all devices along some axes, beside a total that differs along them: a term or a weight."""

    kind: str  # a key of `_REMEDIES`
    axes: Axes
    line: str
    factor: float  # as that of a `_Fact`


class _Fact(NamedTuple):
    """What is known of a value on one device."""

    differs: Axes = frozenset()  # mesh axes over which it may differ
    reduced: Axes = frozenset()  # axes over which the loss made it equal, or cast it to say that it is a device's share
    from_argument: bool = False  # whether it depends on an argument; if not, it is a constant
    factor: float = math.nan  # a constant's value, or the product of the constants by which a value was multiplied
    total: bool = False  # whether it is a sum over this device's examples, as a number of those that a mask keeps
    quotients: frozenset[_Quotient] = frozenset()  # those in which it is linear
    terms: frozenset[_Term] = frozenset()  # those of which it is the sum, beside terms that differ


_REMEDIES = {
    "a term of the total": "Weight it, mean.total + mean.weight * term, or return mean + sk.Mean(term, 1).",
    "the weight": "Divide the total by it, and count the examples, sk.Mean(total / value, count).",
}
_ARGUMENT = _Fact(from_argument=True, factor=1.0)


def find_uncommon_losses(jaxpr: Any, sums: int = 1) -> list[Remark]:
    """Two mistakes in the loss of a step: a sum of each device's quotients, and a term that all devices have and sum.

    A sum of quotients counts only along axes over which the program has at least `sums` reductions.
    """
    reader = _StepReader()
    reader.run(jaxpr, [_ARGUMENT] * len(jaxpr.invars))
    counts: Counter[str] = Counter()  # of the reductions, by axis
    for site in walk(jaxpr):
        if kind_of(site.equation) in ("all_reduce", "reduce_scatter"):
            counts.update(mesh_axes(site.equation))
    remarks = list(reader.remarks)
    for line, axes in reader.quotients.items():
        most_sums = max(counts[axis] for axis in axes)
        if most_sums < sums:
            continue
        message = (
            "each device divides by a sum over its examples, and the quotients are summed over "
            f"{quote(sorted(axes))}: the result differs between meshes, unless these sums are equal."
        )
        remedy = "Return sk.Mean(total, weight) from the loss, or all_reduce the sum before dividing by it."
        remarks.append(Remark("mean-of-quotients", message, line, remedy))
    return remarks


class _StepReader(JaxprInterpreter[_Fact]):
    """Follows a traced step; collects the summed quotients by line, and a remark for each term that all devices share.

    Worked example: `jnp.sum(x) / jnp.sum(mask)` of this device's examples, with `x` and `mask` split over "data". Both
    sums differ over "data", and the divisor is a `total`: the result has the quotient ({"data"}, line). The step
    sums the loss by an all_reduce over "data": the line is a mean of quotients.
    """

    def __init__(self) -> None:
        self.quotients: dict[str, Axes] = {}
        self.remarks: list[Remark] = []  # on terms that all devices share
        self._sizes: dict[str, int] = {}  # of the mesh axes with several devices
        self._of_plan = False  # whether a plan traced the equation that is read, or one around it

    def constant(self, x: Any) -> _Fact:
        return _Fact()

    def literal(self, atom: Any) -> _Fact:
        dtype = atom.aval.dtype
        is_real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
        if is_real and not atom.aval.shape:
            return _Fact(factor=float(atom.val))
        return _Fact(factor=math.nan)

    def step(self, equation: Any, operands: list[_Fact]) -> Sequence[_Fact]:
        if compat.in_scope(equation, MEAN):
            self._check_mean(equation, *operands)
        # The names of scopes begin anew in an inner program, as that of a compressed gather, which has a derivative of
        # its own.
        outer = self._of_plan
        self._of_plan = outer or compat.in_scope(equation, PLAN)
        results = super().step(equation, operands)
        self._of_plan = outer
        return results

    def shard_map(self, equation: Any, body: Any, operands: list[_Fact]) -> Sequence[_Fact]:
        for axis, size in equation.params["mesh"].shape.items():
            if size > 1:
                self._sizes[axis] = size
        arguments = [_ARGUMENT._replace(differs=all_axes(spec)) for spec in equation.params["in_specs"]]
        self.run(body, arguments)
        # Outside of shard_map an array is global, and the same to all devices.
        return [_ARGUMENT] * len(equation.outvars)

    def scan(self, equation: Any, body: Any, operands: list[_Fact]) -> Sequence[_Fact]:
        consts, _, _ = scan_operands(equation, operands)
        return self._run_inner(equation, operands, shared=consts)

    def equation(self, equation: Any, operands: list[_Fact]) -> Sequence[_Fact]:
        if compat.inner_programs(equation):
            return self._run_inner(equation, operands, shared=[])
        fact = _combine(equation, operands, self._of_plan)
        if kind_of(equation) is not None:
            fact = self._send(equation, operands, fact)
        else:
            fact = _compute(equation, operands, fact)
        return [fact] * len(equation.outvars)

    def _run_inner(self, equation: Any, operands: list[_Fact], shared: list[_Fact]) -> list[_Fact]:
        """Follows inner programs. Of a loop only `shared` operands are followed, which are the same in all its turns.

        A turn may be an example that divides by a sum of its own, as a mean over its tokens: that is no mistake.
        """
        fact = _combine(equation, operands, self._of_plan)
        for program in compat.inner_programs(equation):
            jaxpr = getattr(program, "jaxpr", program)
            carried = [_add_varying_axes(fact, variable) for variable in jaxpr.invars[len(shared) :]]
            self.run(program, [*shared, *carried])
        return [_add_varying_axes(fact, variable) for variable in equation.outvars]

    def _send(self, equation: Any, operands: list[_Fact], fact: _Fact) -> _Fact:
        """The fact of a collective's result. A quotient that it sums over devices is recorded."""
        axes = frozenset(mesh_axes(equation))
        kind = kind_of(equation)
        if kind == "all_reduce":
            for operand in operands:
                for quotient in operand.quotients:
                    if quotient.axes & axes:
                        self.quotients[quotient.line] = quotient.axes & axes
        # What comes from a neighbor still differs from device to device.
        if kind == "ppermute":
            return fact
        # A leaf that the plan gathers is to the loss as a leaf that every device holds: the loss did not make it equal.
        reduced = fact.reduced
        if not self._of_plan:
            reduced = reduced | axes
        return fact._replace(differs=fact.differs - axes, reduced=reduced)

    def _check_mean(self, equation: Any, weight: _Fact, total: _Fact) -> None:
        """Records the terms and the weight of a Mean that all devices share and sum: each device counts them again."""
        weight_axes: Axes = frozenset()
        if weight.from_argument:
            weight_axes = total.differs - weight.differs - weight.reduced
        line = own_line(compat.user_frames(equation))
        divisor = _Term("the weight", weight_axes, line, weight.factor)
        total_axes = compat.varying_axes(equation.invars[1].aval) & self._sizes.keys()
        for term in (*total.terms, divisor):
            shared_axes = term.axes & total_axes
            devices = math.prod(self._sizes[axis] for axis in shared_axes)
            if shared_axes and _counts_each_time(term.factor, weight, devices):
                message = (
                    f"{term.kind} of a Mean is the same on all devices along {quote(sorted(shared_axes))}, which sum "
                    "it: it counts once for each of them, unless it is divided by their number."
                )
                self.remarks.append(Remark("term-of-each-device", message, term.line, _REMEDIES[term.kind]))


def _combine(equation: Any, operands: list[_Fact], of_plan: bool) -> _Fact:
    """What is known of a result whatever the equation computes of its operands; `of_plan`: whether a plan traced it."""
    name = equation.primitive.name
    axes = frozenset(mesh_axes(equation))
    differs = _join(fact.differs for fact in operands)
    if name == "axis_index":
        differs |= axes
    from_argument = any(fact.from_argument for fact in operands)
    reduced = _join(fact.reduced for fact in operands)
    # By a cast, a loss says that the value is this device's share.
    if registered(name).cast and from_argument and not of_plan:
        reduced |= axes
    factor = 1.0 if from_argument and name != "div" else math.nan
    return _Fact(differs, reduced, from_argument, factor)


def _add_varying_axes(fact: _Fact, variable: Any) -> _Fact:
    """The fact of a value whose type says that it varies over further axes."""
    return fact._replace(differs=fact.differs | compat.varying_axes(variable.aval))


def _compute(equation: Any, operands: list[_Fact], fact: _Fact) -> _Fact:
    """What is known of the result of a plain primitive."""
    name = equation.primitive.name
    keeps = name in VIEWS or registered(name).cast
    if not keeps and name not in _SCALE | _CONTRACTIONS | {"select_n", "concatenate"}:
        return fact
    out = equation.outvars[0].aval
    quotients = frozenset[_Quotient]()
    if name != "dot_general":
        quotients = _join(operand.quotients for operand in operands)
    # By itself no mistake: it becomes one if the quotients are summed over devices whose sums differ.
    if name == "div" and operands[1].total:
        quotients |= {_Quotient(operands[1].differs, source_line(equation))}
    has_total = any(operand.total for operand in operands)
    keeps_total = keeps or (name in _SCALE and not out.shape)
    # A contraction to a scalar of what differs between devices, as of a mask: it counts this device's examples.
    contracts_to_scalar = name in _CONTRACTIONS and not out.shape
    sums_examples = contracts_to_scalar and bool(fact.differs & compat.varying_axes(out))
    total = (has_total and keeps_total) or sums_examples
    return _add_terms(fact._replace(quotients=quotients, total=total), operands, equation)


def _join(sets: Iterable[frozenset[Any]]) -> frozenset[Any]:
    return frozenset[Any]().union(*sets)


def _add_terms(fact: _Fact, operands: list[_Fact], equation: Any) -> _Fact:
    """The fact with its factor and terms: a sum of scalars may add a term, a product keeps the terms of its operands.

    Worked example: `mean.total + 0.1 * penalty`, of which the total differs over "data" and the penalty, of whole
    weights, does not. The sum has the term ("a term of the total", {"data"}, line, 0.1).
    """
    name = equation.primitive.name
    terms = _join(operand.terms for operand in operands)
    keeps = name in VIEWS or name == "neg" or registered(name).cast
    if keeps or (name == "reduce_sum" and fact.from_argument):
        return fact._replace(factor=operands[0].factor, terms=terms)
    if name == "mul":
        first, second = operands
        if first.differs and second.differs:
            terms = frozenset()
        return fact._replace(factor=first.factor * second.factor, terms=terms)
    if name not in SUMS:
        return fact
    first, second = operands
    is_scalar = not equation.outvars[0].aval.shape
    for addend, neighbor in ((first, second), (second, first)):
        axes = neighbor.differs - addend.differs - addend.reduced
        if axes and addend.from_argument and is_scalar:
            terms |= {_Term("a term of the total", axes, source_line(equation), addend.factor)}
    factor = first.factor if first.from_argument else second.factor
    return fact._replace(factor=factor, terms=terms)


def _counts_each_time(factor: float, weight: _Fact, devices: int) -> bool:
    """Whether a term with this factor counts once on each device, as far as the digits of the factor tell."""
    # Somebody who divides a term by the number of devices leaves more digits: 0.1 over 8 devices becomes 0.0125, and
    # times 8 it has fewer digits again. 0.1 itself times 8 is 0.8, which has no fewer: it was not divided.
    # Beside a constant weight, as 32 examples, 0.0032 may be 32 times 0.0001; 0.0001 is not 32 times 0.000003125.
    digits = _count_digits(factor)
    if weight.from_argument:
        return 0 < digits <= _count_digits(factor * devices)
    factor_of_one = factor / (weight.factor or 1)  # of the 32 examples
    return digits == 1 and _count_digits(factor_of_one) > 2


def _count_digits(x: float) -> int:
    """The number of significant digits that a number is written with: 3 for 0.0125; 0 if it is not known."""
    if not math.isfinite(x):
        return 0
    mantissa, _, _ = f"{x:.5e}".partition("e")
    return len(mantissa.strip("-").replace(".", "").rstrip("0"))


def find_idle_axes(jaxpr: Any) -> list[Remark]:
    """Axes along which all devices do the same work, although a piece of a split dim could be divided by them.

    Only a program with a backward pass is looked at.
    """
    sizes: dict[str, int] = {}
    used: set[str] = set()
    pieces: set[int] = set()  # the sizes of split dims on a device
    has_backward = False
    source = ""
    for site in walk(jaxpr):
        equation = site.equation
        has_backward |= compat.in_backward(equation)
        # Of our own step, the first line of the loss in it.
        if not source and (sizes or site.name == "shard_map"):
            source = own_line(compat.user_frames(equation))
        if site.name != "shard_map":
            if not registered(site.name).cast:
                used |= set(mesh_axes(equation))
            continue
        sizes |= dict(equation.params["mesh"].shape)
        # What the partitioner does along its axes is not in the trace.
        used |= sizes.keys() - set(compat.manual_axes(equation))
        for spec, variable in zip(equation.params["in_specs"], equation.invars, strict=True):
            used |= all_axes(spec)
            for dim, axes in split_dims(spec).items():
                devices = math.prod(sizes[axis] for axis in axes)
                pieces.add(variable.aval.shape[dim] // devices)
    if not has_backward:
        return []
    remarks = []
    for axis, size in sizes.items():
        is_idle = size > 1 and axis not in used
        if is_idle and any(piece % size == 0 for piece in pieces):
            message = (
                f"the {size} devices along axis {axis!r} all do the same work: nothing is split over it and nothing "
                "sent."
            )
            remedy = f"Name it in the plan, as dp(({axis!r}, ...)), or leave it out of the mesh."
            remarks.append(Remark("idle-axis", message, source, remedy))
    return remarks


class Unintended(UserWarning):
    """What the first step says of a program that is right, and not what was meant."""


def warn_of(jaxpr: Any, stacklevel: int) -> None:
    """Warns of all that is unintended in a traced step."""
    # A step sums its metrics over the devices, so one sum along an axis is no mistake: a replica that keeps its
    # gradient to itself, as in diloco, may divide by its own sum. With a second one, the gradient is summed too.
    for remark in (*find_uncommon_losses(jaxpr, sums=2), *find_idle_axes(jaxpr)):
        place = f"{remark.source}: " if remark.source else ""
        warnings.warn(f"step: {place}{remark.message} {remark.remedy}", Unintended, stacklevel=stacklevel + 1)
