"""The compute of a compiled program: FLOPs of its matmuls, bytes that it moves, and seconds by the model of reports.

Compute takes the longer of FLOPs over the chip's bf16 peak and bytes over its memory bandwidth. A collective takes the
bytes that one device sends over the bandwidth that its group can use, by the model of links that the planner has too,
`link_of_group` of `cost/links.py`; here the groups, and where their members are, come from the compiled program.
Each device of a tpu7x has half of its chip's compute and memory bandwidth and all of the chip's links.
Latency, contention between collectives and the chip's real efficiency are left out, so times are lower bounds.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from shardkit._jax.jaxprs import RunShare, find_share
from shardkit._jax.pallas import KernelCost, find_cost
from shardkit.analysis.hlo import proto
from shardkit.analysis.hlo.groups import Groups
from shardkit.analysis.hlo.protobuf import signed
from shardkit.analysis.hlo.trip_counts import trip_count
from shardkit.analysis.jaxpr.counts import taps
from shardkit.cost import Chip, Link
from shardkit.cost.links import Group, link_of_group

# Instructions that are names of values: the compiler gives them no code, or it runs once before the step.
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "iota", "partition-id"}
# Custom calls that are names too: memory that nothing writes yet (`lax.empty`), and one name for the slices of an array
# that asynchronous copies brought onto the chip beside each other.
_FREE_TARGETS = ("AllocateBuffer", "ConcatBitcast")
_SLICES = {"dynamic-slice", "slice", "gather"}  # they read of their first operand as much as they return
# Targets of custom calls into libraries and kernels. A kernel may state its FLOPs; of others reports count the calls.
_KERNELS = re.compile(r"tpu_custom_call|__cublas|__cudnn|__gpu\$xla\.gpu\.triton|triton_kernel|mosaic_gpu")
_MOVES_DATA = ("copy-done", "all-", "reduce-scatter", "collective-", "ragged-all", "async-", "send", "recv")
_DEVICE = 0  # xla's number of the device's large memory
_HOST = 5  # and of the host's; all others are memories on the chip
_ASYNC_TARGETS = ("AsyncCollectiveStart", "AsyncCollectiveDone")  # a fusion that starts or ends a collective on TPU
# Fields of xla's ConvolutionDimensionNumbers ...
_KERNEL_INPUT_FEATURES = 3
_KERNEL_SPATIAL = 6
_OUTPUT_BATCH = 9
_OUTPUT_FEATURES = 10
_INPUT_SPATIAL = 11
_OUTPUT_SPATIAL = 12
# ... and of its WindowDimension.
_STRIDE = 2
_PADDING_LOW = 3
_WINDOW_DILATION = 5
_BASE_DILATION = 6


class Work(NamedTuple):
    """The work of some instructions: FLOPs of matmuls, bytes read and written, seconds by the model.

    `kernels` counts calls of library or custom kernels that do not state their FLOPs.
    """

    flops: int = 0
    bytes: int = 0
    seconds: float = 0.0
    kernels: int = 0

    def plus(self, other: Work, times: int = 1) -> Work:
        """This and `times` times another."""
        return Work(
            self.flops + times * other.flops,
            self.bytes + times * other.bytes,
            self.seconds + times * other.seconds,
            self.kernels + times * other.kernels,
        )

    def scale(self, share: RunShare) -> Work:
        """The mean over the rounds of a loop, of which this share does the work."""
        part = share.runs / share.ticks
        flops = round(self.flops * part)
        size = round(self.bytes * part)
        return Work(flops, size, self.seconds * part, math.ceil(self.kernels * part))  # a kernel is a kernel


NO_WORK = Work()


class Clock(NamedTuple):
    """The model of time: seconds of compute for FLOPs and bytes of memory traffic, seconds on the wire."""

    compute: Callable[[int, int], float]  # of FLOPs and bytes
    wire: Callable[[str, Groups, Fraction], float]  # of a kind, groups of devices and bytes sent


def _no_compute(flops: int, size: int) -> float:
    return 0.0


def _no_wire(kind: str, groups: Groups, sent: Fraction) -> float:
    return 0.0


NO_CLOCK = Clock(_no_compute, _no_wire)


class ModuleWork:
    """The work of a module's instructions; each computation is read once.

    Bytes count operands and result as a fused loop would move them: an operand that a fusion slices counts as the
    slice. Collectives are not work. Neither is an asynchronous copy to or from memory on the chip, because the
    instruction that reads the copy, or wrote it, counts the same bytes. A copy to or from the host counts what it reads
    or writes in the device's memory, without the transfer itself.

    For example a fusion reads one layer of a stack f32[12, 64, 64], multiplies it by 2 and writes it into a stack of
    results in place: 16 KB read and 16 KB written, not twelve times as much.
    """

    def __init__(self, module: proto.Module, seconds: Callable[[int, int], float]):
        self.module = module
        self.seconds = seconds
        self._work_by_number: dict[int, Work] = {}

    def of_computation(self, number: int) -> Work:
        """The work of one run of a computation."""
        if number not in self._work_by_number:
            computation = self.module.computations[number]
            total = NO_WORK
            for instruction in computation.instructions.values():
                total = total.plus(self.of(computation, instruction))
            self._work_by_number[number] = total
        return self._work_by_number[number]

    def of(self, computation: proto.Computation, instruction: proto.Instruction) -> Work:
        """The work of one instruction, a loop with all its iterations; an unknown length counts once."""
        opcode = instruction.opcode
        if opcode in _FREE or instruction.target in _FREE_TARGETS or _moves_data(instruction):
            return NO_WORK
        if opcode == "while":
            times, _ = trip_count(self.module, computation, instruction, {})
            if times is None:
                times = 1
            body = self.of_computation(instruction.calls[0])
            return NO_WORK.plus(body, times)
        if opcode == "conditional":
            largest = self._largest_branch(instruction)
            share = find_share(instruction.op_name)
            if share is None:
                return largest
            return largest.scale(share)
        if opcode == "call":
            return self.of_computation(instruction.calls[0])
        if opcode == "copy-start":
            size = _count_copied_bytes(instruction)
            return Work(0, size, self.seconds(0, size))
        return self._count_code(computation, instruction)

    def _count_code(self, computation: proto.Computation, instruction: proto.Instruction) -> Work:
        """The work of an instruction with code of its own, which reads its operands and writes its result."""
        flops = self.flops(computation, instruction)
        size = _bytes_written(self.module, computation, instruction)
        for number in range(len(instruction.operands)):
            size += self._bytes_read(computation, instruction, number)
        kernels = 0
        if _KERNELS.match(instruction.target):
            kernels = 1
        cost = _find_stated_cost(instruction)
        if kernels and cost is not None:
            kernels = 0
            flops = cost.flops
            size = max(size, cost.moved)  # what a kernel reads several times is in its cost alone
        return Work(flops, size, self.seconds(flops, size), kernels)

    def _largest_branch(self, conditional: proto.Instruction) -> Work:
        """Of each figure the largest: one branch may have the FLOPs and another the memory traffic."""
        branches = [self.of_computation(call) for call in conditional.calls]
        return Work(
            max(branch.flops for branch in branches),
            max(branch.bytes for branch in branches),
            max(branch.seconds for branch in branches),
            max(branch.kernels for branch in branches),
        )

    def flops(self, computation: proto.Computation, instruction: proto.Instruction) -> int:
        """FLOPs of the matmuls in an instruction; one multiply and one add are two."""
        if instruction.opcode == "dot":
            # f32[8,16] dot f32[16,4], contracting 16: 2 x 32 elements x 16.
            lhs = computation.instructions[instruction.operands[0]].shape
            contracted = math.prod(lhs.dims[dim] for dim in instruction.contracting)
            return 2 * instruction.shape.size * contracted
        if instruction.opcode == "convolution":
            lhs, rhs = (computation.instructions[operand].shape for operand in instruction.operands[:2])
            return _convolution_flops(instruction, lhs, rhs)
        if instruction.opcode != "fusion":
            return 0
        fused = self.module.computations[instruction.calls[0]]
        return sum(self.flops(fused, part) for part in fused.instructions.values())

    def _bytes_read(self, computation: proto.Computation, instruction: proto.Instruction, number: int) -> int:
        """Bytes that an instruction reads of operand `number`.

        For example of a stack f32[12, 64, 64] of which a fusion slices one layer 16 KB, and of an operand that it reads
        twice the bytes once: no more than the operand has.
        """
        if _moves_data(instruction):  # in a fusion, beside the compute that hides it
            return 0
        size = computation.instructions[instruction.operands[number]].shape.bytes
        if instruction.opcode in _SLICES:
            if number > 0:  # where the slice begins
                return 0
            return min(size, instruction.shape.bytes)
        if instruction.opcode == "dynamic-update-slice" and number == 0:
            return 0
        if instruction.opcode != "fusion":
            return size
        fused = self.module.computations[instruction.calls[0]]
        parameter = fused.parameters.get(number)
        if parameter is None:
            return size
        return min(size, self._bytes_read_inside(fused, parameter))

    def _bytes_read_inside(self, fused: proto.Computation, value: proto.Instruction) -> int:
        """Bytes that the users of a value inside a fusion read of it, fusions inside the fusion included."""
        size = 0
        for user in fused.instructions.values():
            for number, operand in enumerate(user.operands):
                if operand != value.id:
                    continue
                if self._is_renaming(user):
                    size += self._bytes_read_inside(fused, user)
                else:
                    size += self._bytes_read(fused, user, number)
        return size

    def _is_renaming(self, instruction: proto.Instruction) -> bool:
        """Whether an instruction only gives a value another shape: the TPU's compiler puts bitcasts of the operands of
        a matmul into fusions of their own, inside the matmul's."""
        if instruction.opcode != "fusion":
            return instruction.opcode == "bitcast"
        fused = self.module.computations[instruction.calls[0]]
        return all(part.opcode in ("parameter", "bitcast") for part in fused.instructions.values())


def _find_stated_cost(call: proto.Instruction) -> KernelCost | None:
    """What a call of a kernel of Pallas says that it computes and moves, by `cost_estimate=` or in its name."""
    estimate = call.config.get("custom_call_config", {}).get("cost_estimate")
    if not estimate:
        return find_cost(call.op_name)
    flops, exps, moved = (int(estimate.get(key, 0)) for key in ("flops", "transcendentals", "bytes_accessed"))
    return KernelCost(flops, exps, moved)


def _bytes_written(module: proto.Module, computation: proto.Computation, instruction: proto.Instruction) -> int:
    """Bytes that an instruction writes; an update in place writes what it updates."""
    opcode = instruction.opcode
    if _moves_data(instruction) or opcode == "parameter":  # a parameter that a fusion hands on
        return 0
    if opcode == "fusion":
        fused = module.computations[instruction.calls[0]]
        return _bytes_written(module, fused, fused.instructions[fused.root])
    if opcode == "dynamic-update-slice":
        return computation.instructions[instruction.operands[1]].shape.bytes
    if opcode in ("bitcast", "tuple"):  # the root of a fusion
        parts = [computation.instructions[operand] for operand in instruction.operands]
        return sum(_bytes_written(module, computation, part) for part in parts)
    return instruction.shape.bytes


def _count_copied_bytes(copy: proto.Instruction) -> int:
    """Bytes of the device's large memory that an asynchronous copy reads or writes; none to or from the chip's.

    A copy-start returns a tuple of destination, source and a handle; the memory of each is the `space` of its shape.
    """
    copied_bytes = 0
    for end in copy.shape.parts[:2]:
        if end.space not in (_DEVICE, _HOST):
            return 0
        if end.space == _DEVICE:
            copied_bytes += end.bytes
    return copied_bytes


def _moves_data(instruction: proto.Instruction) -> bool:
    """Whether an instruction moves data between devices or memories, and does no work of its own."""
    return instruction.opcode.startswith(_MOVES_DATA) or instruction.target in _ASYNC_TARGETS


def _convolution_flops(convolution: proto.Instruction, left: proto.Shape, right: proto.Shape) -> int:
    """FLOPs of a convolution, without multiplications by padding or by the holes of a dilation.

    The TPU compiler writes every matmul as a convolution, and a batch dim as a window over holes.
    """
    numbers = convolution.convolution
    spatial_dims = zip(
        numbers[_INPUT_SPATIAL], numbers[_KERNEL_SPATIAL], numbers[_OUTPUT_SPATIAL], convolution.window, strict=True
    )
    pairs = 1  # of an element of the input and one of the kernel that are multiplied
    for input_dim, kernel_dim, output_dim, window in spatial_dims:
        pairs *= taps(
            left.dims[input_dim],
            right.dims[kernel_dim],
            convolution.shape.dims[output_dim],
            stride=window.get(_STRIDE, 1),
            low=signed(window.get(_PADDING_LOW, 0)),
            step=window.get(_WINDOW_DILATION, 1),
            holes=window.get(_BASE_DILATION, 1),
        )
    input_features = right.dims[numbers[_KERNEL_INPUT_FEATURES]]
    batch = convolution.shape.dims[numbers[_OUTPUT_BATCH]]
    output_features = convolution.shape.dims[numbers[_OUTPUT_FEATURES]]
    return 2 * pairs * batch * output_features * input_features


def clock_of(platform: str, chip: Chip, places: Sequence[Sequence[int]]) -> Clock:
    """The model for a mesh whose device i is at `places[i]`: torus coordinates, or (slice, host, GPU)."""

    def compute(flops: int, size: int) -> float:
        return max(flops / chip.flops, size / chip.hbm_bandwidth)

    @lru_cache(maxsize=1024)
    def find_link(kind: str, groups: Groups) -> Link:
        everyone = (tuple(range(len(places))),)
        return link_of_group(chip, kind, _locate(groups or everyone, places, platform))

    def wire(kind: str, groups: Groups, sent: Fraction) -> float:
        return find_link(kind, groups).seconds(float(sent))

    return Clock(compute, wire)


def _locate(groups: Groups, places: Sequence[Sequence[int]], platform: str) -> Group:
    """Where the members of groups stand: the dims of a torus that they span, or how many are on a host."""
    dims = _find_spanned_dims(groups, places)
    if platform != "cuda":
        return Group(dims=max(1, len(dims)))
    if not dims & {0, 1}:  # one host of one slice
        return Group()
    return Group(members_on_a_host=_count_members_on_a_host(groups, places))


def _find_spanned_dims(groups: Groups, places: Sequence[Sequence[int]]) -> set[int]:
    """The dims of the torus, or of (slice, host, GPU), along which members of a group differ.

    For example the group (0, 5) of GPUs at (0, 0, 0) and (0, 1, 1) spans the dims {1, 2}: it crosses hosts.
    """
    dims = set()
    for group in groups:
        first = places[group[0]]
        for device in group[1:]:
            for dim, coordinate in enumerate(places[device]):
                if coordinate != first[dim]:
                    dims.add(dim)
    return dims


def _count_members_on_a_host(groups: Groups, places: Sequence[Sequence[int]]) -> int:
    """How many members every group has at least on each of its hosts: as many network adapters carry its messages."""
    fewest = len(places)
    for group in groups:
        # Members by (slice, host).
        members = Counter(tuple(places[device][:2]) for device in group)
        fewest = min(fewest, min(members.values()))
    return fewest
