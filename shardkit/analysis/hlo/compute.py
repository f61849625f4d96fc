"""The compute of a compiled program: FLOPs of its matmuls, bytes that it moves, and seconds by the model of reports.

Compute takes the longer of FLOPs over the chip's bf16 peak and bytes over its memory bandwidth. A collective takes the
bytes that one device sends over the bandwidth that its group can use: on a torus, both directions of every dimension
along which the group extends, one direction for a permute; on GPUs, NVLink inside a host, and between hosts the network
adapters of all members that the group has on a host, since each GPU has its own and a ring can cross by each of them.
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

from shardkit.analysis.hlo import proto
from shardkit.analysis.hlo.groups import Groups
from shardkit.analysis.hlo.trip_counts import trip_count
from shardkit.analysis.jaxpr.counts import taps
from shardkit.cost import Chip, group_bandwidth

_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "iota", "partition-id"}
_SLICES = {"dynamic-slice", "slice", "gather"}
_KERNELS = re.compile(r"tpu_custom_call|__cublas|__cudnn|__gpu\$xla\.gpu\.triton|triton_kernel|mosaic_gpu")
_MOVED = ("copy-done", "all-", "reduce-scatter", "collective-", "ragged-all", "async-", "send", "recv")
_DEVICE, _HOST = 0, 5  # xla's numbers of memories; all others are on the chip
_HALVES = ("AsyncCollectiveStart", "AsyncCollectiveDone")  # of an asynchronous collective, in fusions


class Work(NamedTuple):
    """The work of some instructions: FLOPs of matmuls, bytes read and written, seconds by the model.

    `kernels` counts calls of library or custom kernels, whose FLOPs the program does not show.
    """

    flops: int = 0
    bytes: int = 0
    seconds: float = 0.0
    kernels: int = 0

    def plus(self, other: Work, times: int = 1) -> Work:
        """This and `times` times another."""
        return Work._make(mine + times * more for mine, more in zip(self, other, strict=True))


NO_WORK = Work()


class Clock(NamedTuple):
    """The model of time: seconds of compute for FLOPs and bytes of memory traffic, seconds on the wire."""

    compute: Callable[[int, int], float]  # of FLOPs and bytes
    wire: Callable[[str, Groups, Fraction], float]  # of a kind, groups of devices and bytes sent


NO_CLOCK = Clock(lambda flops, size: 0.0, lambda kind, groups, sent: 0.0)


class ModuleWork:
    """The work of a module's instructions; each computation is read once.

    The bytes are those of operands and result as a fused loop would move them: an operand that a fusion slices
    counts as the slice. Collectives are not work, nor is an asynchronous copy to or from memory on the chip: its bytes
    are those that its reader reads, or its writer has written. Of one to or from the host, the bytes of the device's
    memory count, and not the way between.
    """

    def __init__(self, module: proto.Module, seconds: Callable[[int, int], float]):
        self.module, self.seconds = module, seconds
        self._known: dict[int, Work] = {}

    def of_computation(self, number: int) -> Work:
        """The work of one run of a computation."""
        if number not in self._known:
            computation = self.module.computations[number]
            total = NO_WORK
            for each in computation.instructions.values():
                total = total.plus(self.of(computation, each))
            self._known[number] = total
        return self._known[number]

    def of(self, computation: proto.Computation, each: proto.Instruction) -> Work:
        """The work of one instruction, a loop with all its iterations; an unknown length counts once.

        Of a conditional's branches each figure is the largest: one may have the FLOPs and another the memory traffic.
        """
        if each.opcode in _FREE or _moves(each):
            return NO_WORK
        if each.opcode == "while":
            times = trip_count(self.module, computation, each, {})[0]
            return NO_WORK.plus(self.of_computation(each.calls[0]), 1 if times is None else times)
        if each.opcode == "conditional":
            return Work._make(map(max, zip(*map(self.of_computation, each.calls), strict=True)))
        if each.opcode == "call":
            return self.of_computation(each.calls[0])
        if each.opcode == "copy-start":
            ends = each.shape.parts[:2]
            on_chip = any(end.space not in (_DEVICE, _HOST) for end in ends)
            size = 0 if on_chip else sum(end.bytes for end in ends if end.space == _DEVICE)
            return Work(0, size, self.seconds(0, size))
        flops = self.flops(computation, each)
        size = _written(self.module, computation, each) + sum(
            self._read(computation, each, number) for number in range(len(each.operands))
        )
        return Work(flops, size, self.seconds(flops, size), int(bool(_KERNELS.match(each.target))))

    def flops(self, computation: proto.Computation, each: proto.Instruction) -> int:
        """FLOPs of the matmuls in an instruction; one multiply and one add are two."""
        if each.opcode == "dot":
            left = computation.instructions[each.operands[0]].shape
            return 2 * each.shape.size * math.prod(left.dims[d] for d in each.contracting)
        if each.opcode == "convolution":
            return _convolution(each, *(computation.instructions[o].shape for o in each.operands[:2]))
        if each.opcode != "fusion":
            return 0
        inner = self.module.computations[each.calls[0]]
        return sum(self.flops(inner, other) for other in inner.instructions.values())

    def _read(self, computation: proto.Computation, each: proto.Instruction, number: int) -> int:
        """Bytes that an instruction reads of one operand."""
        if _moves(each):  # in a fusion, beside the compute that hides it
            return 0
        whole = computation.instructions[each.operands[number]].shape.bytes
        if each.opcode in _SLICES:
            return min(whole, each.shape.bytes) if number == 0 else 0
        if each.opcode == "dynamic-update-slice" and number == 0:
            return 0
        if each.opcode != "fusion":
            return whole
        inner = self.module.computations[each.calls[0]]
        parameter = inner.parameters.get(number)
        return whole if parameter is None else min(whole, self._touched(inner, parameter))

    def _touched(self, computation: proto.Computation, value: proto.Instruction) -> int:
        """Bytes that the users of a value inside a fusion read of it, fusions inside the fusion included."""
        size = 0
        for user in computation.instructions.values():
            for number, operand in enumerate(user.operands):
                if operand == value.id:
                    seen = user.opcode == "bitcast"
                    size += self._touched(computation, user) if seen else self._read(computation, user, number)
        return size


def _written(module: proto.Module, computation: proto.Computation, each: proto.Instruction) -> int:
    """Bytes that an instruction writes; an update in place writes what it updates."""
    if _moves(each) or each.opcode == "parameter":  # a parameter that a fusion hands on
        return 0
    if each.opcode == "fusion":
        inner = module.computations[each.calls[0]]
        return _written(module, inner, inner.instructions[inner.root])
    if each.opcode == "dynamic-update-slice":
        return computation.instructions[each.operands[1]].shape.bytes
    if each.opcode in ("bitcast", "tuple"):  # the root of a fusion
        return sum(_written(module, computation, computation.instructions[o]) for o in each.operands)
    return each.shape.bytes


def _moves(each: proto.Instruction) -> bool:
    """Whether an instruction moves data between devices or memories, and does no work of its own."""
    return each.opcode.startswith(_MOVED) or each.target in _HALVES


def _convolution(each: proto.Instruction, left: proto.Shape, right: proto.Shape) -> int:
    """FLOPs of a convolution without those that padding and dilation holes would cost.

    The TPU compiler writes every matmul as a convolution, and a batch dim as a window over holes.
    """
    numbers = each.convolution
    pairs = 1
    for at, kernel, result, window in zip(numbers[11], numbers[6], numbers[12], each.window, strict=True):
        low = window.get(3, 0)
        pairs *= taps(
            left.dims[at],
            right.dims[kernel],
            each.shape.dims[result],
            stride=window.get(2, 1),
            low=low - (1 << 64) if low >= 1 << 63 else low,
            step=window.get(5, 1),
            holes=window.get(6, 1),
        )
    features = right.dims[numbers[3]]
    return 2 * pairs * each.shape.dims[numbers[9]] * each.shape.dims[numbers[10]] * features


def clock_of(platform: str, chip: Chip, places: Sequence[Sequence[int]]) -> Clock:
    """The model for a mesh whose device i is at `places[i]`: torus coordinates, or (slice, host, GPU)."""

    def compute(flops: int, size: int) -> float:
        return max(flops / chip.flops, size / chip.hbm_bandwidth)

    @lru_cache(maxsize=1024)
    def bandwidth(kind: str, groups: Groups) -> float:
        groups = groups or (tuple(range(len(places))),)
        spans = {
            dim
            for group in groups
            for device in group[1:]
            for dim, (a, b) in enumerate(zip(places[group[0]], places[device], strict=True))
            if a != b
        }
        if platform == "cuda":
            if not spans & {0, 1}:
                return chip.link_bandwidth
            together = min(min(Counter(tuple(places[device][:2]) for device in group).values()) for group in groups)
            return min(chip.link_bandwidth, chip.network_bandwidth * (1 if kind == "ppermute" else together))
        return chip.link_bandwidth if kind == "ppermute" else group_bandwidth(chip, max(1, len(spans)))

    def wire(kind: str, groups: Groups, sent: Fraction) -> float:
        return float(sent) / bandwidth(kind, groups)

    return Clock(compute, wire)
