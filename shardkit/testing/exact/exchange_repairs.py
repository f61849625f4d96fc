"""Repairs of what devices send to each other: of collectives, and of those that are missing behind an equation.

These are the mistakes of programs with collectives: a missing sum, a sum over another axis, a neighbour on the wrong
side, a mask that is missing before a sum.

A value has a dim in front for each bound mesh axis. Worked example, of `psum(x, "a")` on a=2, b=3:

    x                                           [2, 3] + [4]
    the psum                                    [1, 3] + [4]
    repair_collective: psum over "b"            [2, 1] + [4], of x
    repair_sum: the sum over "b" of the psum    [1, 1] + [4], of the psum
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardkit._arguments.checks import quote
from shardkit._jax.jaxprs import kind_of, mesh_axes
from shardkit._jax.primitives import registered
from shardkit.testing.exact.numbers.assembly import where
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.repairs import (
    Bench,
    Cost,
    EquationChange,
    FunctionChange,
    Operands,
    Repair,
    Values,
    change_operands,
    change_result,
    is_integer,
    keep_operands,
    list_subsets,
)
from shardkit.testing.exact.rules.operands import Operand

# Each distance is tried by one more run of the program, and a neighbour is the likelier mistake than a device far off.
_MOST_DISTANCES = 8
# A sum over devices may be missing behind these equations. Behind one that only passes elements on it is missing behind
# the equation that made the elements, too, and is tried there.
_SUMMED = {
    "add",
    "sub",
    "mul",
    "div",
    "neg",
    "integer_pow",
    "square",
    "reduce_sum",
    "dot_general",
    "cumsum",
    "scatter-add",
    "select_n",
    "gather",
    "dynamic_slice",
    "psum",
    "psum_invariant",
    "shard_map",
    "conv_general_dilated",
    "reduce_window_sum",
}
_REDUCTIONS = ("sum", "maximum", "minimum")
_EXTREMES = {"reduce_max": "maximum", "max": "maximum", "reduce_min": "minimum", "min": "minimum"}


# Collectives


def repair_collective(bench: Bench) -> Iterator[Repair]:
    """No collective, one over other axes, one between other devices, or another reduction."""
    row = registered(bench.call.primitive)
    if row.kind is None:
        return
    bound = mesh_axes(bench.equation)
    if row.sent is not None:  # a ragged exchange, of which other operands say what is sent
        yield from _repair_axes(bench, bound)
        return
    [x] = bench.operands
    # A collective that changes the shape cannot be left out, because the equations behind it would not fit.
    if bench.shape(x) == bench.shape(bench.result):
        yield change_operands(Cost.COLLECTIVE, f"without {bench.name}", keep_operands)
    if row.kind == "all_reduce":
        yield from _repair_reduction(bench, bound, row.reduces or "sum")
    if row.kind == "all_gather":
        yield from _repair_order_of_axes(bench, bound)
    if row.kind in ("all_gather", "all_to_all", "ppermute", "reduce_scatter"):
        yield from _repair_axes(bench, bound)
    if row.kind == "ppermute":
        yield from _repair_permutation(bench, bound)


def _repair_reduction(bench: Bench, bound: tuple[str, ...], operator: str) -> Iterator[Repair]:
    """A reduction over other axes, or by another operator."""
    for names in list_subsets(bench.axes):
        if set(names) != set(bound):
            words = _describe_axes(bench, names, bound)
            yield change_operands(Cost.COLLECTIVE, words, _reduce_operand, bench, names, operator)
    for other in _REDUCTIONS:
        if other != operator:
            words = f"the {other} over {quote(bound)} in place of {bench.name}"
            yield change_operands(Cost.SUM, words, _reduce_operand, bench, bound, other)


def _reduce_operand(operands: Operands, bench: Bench, names: Sequence[str], operator: str) -> Operands:
    return [bench.reduce(operands[0], names, operator)]


def _repair_order_of_axes(bench: Bench, bound: tuple[str, ...]) -> Iterator[Repair]:
    """An all_gather over the same axes in another order, major to minor."""
    for names in itertools.permutations(bound):
        if names != bound:
            words = _describe_axes(bench, names, bound)
            yield change_operands(Cost.COLLECTIVE, words, _gather_operand, bench, names)


def _gather_operand(operands: Operands, bench: Bench, names: Sequence[str]) -> Operands:
    params = bench.equation.params
    return [bench.devices.gather(operands[0], names, params["all_gather_dimension"], params["tiled"])]


def _repair_axes(bench: Bench, bound: tuple[str, ...]) -> Iterator[Repair]:
    """A collective over other axes that have as many devices, so that its result has the same shape.

    Worked example: on a mesh of row=2, col=2, `all_gather(x, "row")` where the columns should be gathered.
    """
    # The parameter that has the axes is called "axis_name" by some collectives, "axes" by others.
    [param] = [param for param in registered(bench.call.primitive).axes if param in bench.equation.params]
    devices = bench.count_devices(bound)
    for names in list_subsets(bench.axes):
        if bench.count_devices(names) == devices and set(names) != set(bound):
            words = _describe_axes(bench, names, bound)
            yield change_operands(Cost.COLLECTIVE, words, bench.rerun_with_param, param, names)


def _describe_axes(bench: Bench, names: Sequence[str], bound: Sequence[str]) -> str:
    """The collective over axes `names` in place of `bound`, in words."""
    return f"{bench.name} over {quote(names)} in place of {quote(bound)}"


def _repair_permutation(bench: Bench, bound: tuple[str, ...]) -> Iterator[Repair]:
    """A ppermute between other pairs of devices: backwards, further on, without the pair that closes the ring.

    Worked example, of three devices in which each sends to the next one, [(0, 1), (1, 2), (2, 0)]:

        the other way round             [(1, 0), (2, 1), (0, 2)]
        1 further on, without a wrap    [(0, 1), (1, 2)]: device 0 gets zeros
        2 back, without a wrap          [(2, 0)]
    """
    n = bench.count_devices(bound)
    backwards = [(receiver, sender) for sender, receiver in bench.equation.params["perm"]]
    yield _send_along(bench, "ppermute the other way round", backwards, bound)
    for distance in range(1, min(n, _MOST_DISTANCES)):
        words = f"ppermute from each device to that {distance} further on"
        pairs = [(i, (i + distance) % n) for i in range(n)]
        yield _send_along(bench, words, pairs, bound)
        # Of a line of devices nobody sends to the first one, which gets zeros.
        pairs = [(i, i + distance) for i in range(n - distance)]
        yield _send_along(bench, f"{words}, without a wrap", pairs, bound)
        pairs = [(i + distance, i) for i in range(n - distance)]
        words = f"ppermute from each device to that {distance} back, without a wrap"
        yield _send_along(bench, words, pairs, bound)


def _send_along(bench: Bench, words: str, pairs: list[tuple[int, int]], bound: tuple[str, ...]) -> Repair:
    """The ppermute with other pairs of a sender and a receiver."""
    return change_operands(Cost.COLLECTIVE, words, _permute_operand, bench, pairs, bound)


def _permute_operand(operands: Operands, bench: Bench, pairs: Any, names: Sequence[str]) -> Operands:
    return [bench.permute(operands[0], pairs, names)]


@dataclass(frozen=True)
class Travel(EquationChange):
    """Reads an operand that goes to the next device in every round of a loop, as a block of keys does in a ring.

    Worked example: tokens and their documents in a ring of three devices. The keys travel, and the numbers of their
    documents stay; in round 0 that is right, in round 1 the numbers should come from one device further back, in
    round 2 from two. No repair of one round makes the result right.

    Attributes:
        bench: the tools for the equation that reads the operand.
        number: the number of the operand.
        names: the axes along which the operand travels.
        pairs: (sender, receiver), as for ppermute.
        steps: how often the operand has travelled before the equation reads it.
    """

    bench: Bench
    number: int
    names: Sequence[str]
    pairs: Any
    steps: int

    def __call__(self, operands: Operands, results: Operands, values: Values) -> Operands:
        """The results of the equation, which reads the operand after it has travelled."""
        x = operands[self.number]
        for _ in range(self.steps):
            x = self.bench.permute(x, self.pairs, self.names)
        return self.bench.rerun_with_operand(operands, self.number, x)

    def in_round(self, round_number: int) -> Travel:
        """The change so many rounds later, when the operand has travelled as many times more."""
        return replace(self, steps=self.steps + round_number)


# Gathers


def repair_broadcast(bench: Bench) -> Iterator[Repair]:
    """An all_gather over devices, in place of copies of one device's value.

    Worked example: two devices have levels [3] and a scale each. A device gathers the levels, [2, 3], and needs the two
    scales, [2]. `jnp.broadcast_to(scale, (2,))` has twice the scale of this device, and should be an all_gather.
    """
    [x] = bench.operands
    # The dims of the result that x has, and those that it has not: [3] becomes [2, 3] by dims (1,), so that 0 is added.
    dims = bench.equation.params["broadcast_dimensions"]
    shape = bench.shape(bench.result)
    added = [dim for dim in range(len(shape)) if dim not in dims]
    if len(added) != 1 or bench.shape(x) != tuple(shape[dim] for dim in dims):
        return
    [dim] = added
    for axis in bench.find_varying_axes(x):
        if bench.axes[axis] == shape[dim]:
            words = f"all_gather over {quote((axis,))} in place of copies"
            yield change_operands(Cost.SUM, words, _gather_copies, bench, axis, dim)


def _gather_copies(operands: Operands, bench: Bench, axis: str, dim: int) -> Operands:
    return [bench.devices.gather(operands[0], (axis,), dim, False)]


@dataclass(frozen=True)
class Gathering(EquationChange):
    """Reads the rows of all devices of an operand, in place of the rows of this device. So the result has more rows.

    Worked example: `(x @ y.T).sum()`, of all pairs of two samples, on two devices with x [3, 5] and y [4, 5].

        as it is        x @ y.T is [3, 4]: the pairs of this device's x with this device's y
        repaired        x @ all_gather(y).T is [3, 8]: the pairs of this device's x with every y
        the sum         [] in both programs

    Attributes:
        bench: the tools for the equation that reads the operand.
        number: the number of the operand.
        names: the axes along which the operand is gathered.
        dim: the dim of the operand that grows.
    """

    bench: Bench
    number: int
    names: Sequence[str]
    dim: int
    has_more_rows = True

    def __call__(self, operands: Operands, results: Operands, values: Values) -> Operands:
        """The results of the equation, which reads the rows of all devices."""
        x = self.bench.devices.gather(operands[self.number], self.names, self.dim, True)
        return self.bench.rerun_with_operand(operands, self.number, x)


def repair_rows(bench: Bench) -> Iterator[Repair]:
    """A matrix product with the rows of all devices: an all_gather is missing in front of the product."""
    if bench.call.primitive != "dot_general":
        return
    contracted, batched = bench.equation.params["dimension_numbers"]
    for number, x in enumerate(bench.operands):
        # Only a dim that stays in the result has more rows after a gather. A contracted dim would no longer fit the
        # other operand.
        joined = {*contracted[number], *batched[number]}
        # Of x @ y.T with y [4, 5] dim 1 is contracted, and dim 0 may have more rows.
        rows = [dim for dim in range(len(bench.shape(x))) if dim not in joined]
        for names in list_subsets(bench.find_varying_axes(x)):
            words = f"an operand of {bench.name} that is gathered over {quote(names)}"
            for dim in rows:
                yield Repair(Cost.OPERAND, words, Gathering(bench, number, names, dim))


# Missing reductions


def repair_sum(bench: Bench) -> Iterator[Repair]:
    """Behind the equation a sum, mean or extreme over axes along which the result varies, or a ppermute."""
    name = bench.name
    varying = bench.find_varying_axes(bench.result)
    for names in list_subsets(varying):
        yield from _repair_missing_reduction(bench, names)
    if name not in _SUMMED:
        return
    for axis in varying:
        n = bench.axes[axis]
        # Both neighbours, which are one device where n is 2. With step 1 each device reads the one before it, which
        # is n - 1 further on.
        for step in sorted({1, n - 1}):
            pairs = [(i, (i + step) % n) for i in range(n)]
            words = f"{name} of the device {n - step} further on along {axis!r}"
            yield change_result(Cost.RARE, words, bench.permute, pairs, [axis], exchange="shift")


def _repair_missing_reduction(bench: Bench, names: Sequence[str]) -> Iterator[Repair]:
    """The sum and the mean over some axes, or the extreme behind an equation that takes one."""
    name = bench.name
    ending = f"of {name} over {quote(names)}"
    operator = _EXTREMES.get(name)
    if operator is not None:
        yield change_result(Cost.SUM, f"the {operator} {ending}", bench.reduce, names, operator, exchange="sum")
        return
    if name not in _SUMMED:
        return
    yield change_result(Cost.SUM, f"the sum {ending}", bench.reduce, names, exchange="sum")
    if not is_integer(bench.result):
        yield change_result(Cost.SUM, f"the mean {ending}", bench.average, names, exchange="sum")


# Masks


def repair_mask(bench: Bench) -> Iterator[Repair]:
    """A mask of the program, applied to the operand of a sum over devices, or to the result of another equation.

    Worked example: of 7 rows over two devices the last row of device 1 is padding. `psum((x * x).sum())` adds the
    padding too; x * x should be zero where `row < 7` is false.
    """
    # Before a sum over devices the operand is masked. The sum is the same on all devices, and a mask that differs
    # between devices says nothing of it.
    reduces = kind_of(bench.equation) in ("all_reduce", "reduce_scatter")
    target = bench.operands[0] if reduces else bench.result
    if not isinstance(target, Exact):
        return
    words = f"{bench.name} of what is zero where a mask is false"
    for variable in bench.variables.readable:
        if not _may_mask(variable.aval, bench.shape(target)):
            continue
        if reduces:
            yield Repair(Cost.SUM, words, _mask_operand(bench, variable))
        else:
            yield Repair(Cost.FACTOR, words, _mask_result(bench, variable), behind=True)


def _may_mask(aval: Any, target: tuple[int, ...]) -> bool:
    """Whether a type is an array of booleans with the first dims of a target: a mask [t] of a value [t, d]."""
    if getattr(aval, "dtype", None) != np.dtype("bool"):
        return False
    shape = getattr(aval, "shape", ())
    # One boolean for all elements is a branch, and no mask.
    return shape != () and shape == target[: len(shape)]


def _mask_operand(bench: Bench, variable: Any) -> EquationChange:
    @FunctionChange
    def change(operands: Operands, results: Operands, values: Values) -> Operands:
        return bench.rerun([_mask(bench, operands[0], values[variable])])

    return change


def _mask_result(bench: Bench, variable: Any) -> EquationChange:
    @FunctionChange
    def change(operands: Operands, results: Operands, values: Values) -> Operands:
        return [_mask(bench, results[0], values[variable])]

    return change


def _mask(bench: Bench, x: Operand, mask: Operand) -> Operand:
    """x with zeros where a mask is false, which has the first dims of x."""
    # Worked example, on two devices: beside x [2] + [4, 3] a mask [2] + [4] becomes [2] + [4, 1].
    missing = len(bench.shape(x)) - len(bench.shape(mask))
    mask = mask.reshape(mask.shape + (1,) * missing)
    zero = bench.field.lift(np.zeros((1,) * len(x.shape), np.float32))
    return where(mask, x, zero)
