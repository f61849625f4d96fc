"""The forms of a collective matmul: how long each takes on a chip, and which one is the fastest.

A ring takes as long as its matmuls, of which each is the longer of FLOPs and memory traffic: the weights are read at
each hop. A message is sent beside a matmul, and the ring waits for what is left of it. To that comes memory traffic of
no matmul: what a loop sends on is copied, arriving sums are added, and gradients of weights are summed in float32.
Compilers of TPUs slice and store inside of the matmul, those of GPUs before and after it.

No figure is fitted to a time: they are passes over an array in memory, as they stand in compiled programs, and habits
of the compilers of jax 0.10.2, each with a name here. Times are lower bounds without latency, as of `aot.compile`.
`benchmarks/matmul_forms.py` compares the choice with what compilers make of every form.
"""

from __future__ import annotations

from typing import NamedTuple

from shardkit.cost.hardware import Chip
from shardkit.cost.links import Group, link_of_group, links

_SUM_BYTES = 4  # of a value of a partial sum: float32
# A GPU's compiler merges matmuls that share an operand into one, if each reads and writes less (XLA's option
# xla_gpu_dot_merger_threshold_mb). Over two devices, where no loop keeps them apart, one then waits for the message.
_MERGED_BYTES = 64 * 2**20
# TPUs whose compilers, without options, run a gather, or a reduce_scatter, beside a matmul of other values; those of
# GPUs do both.
_GATHER_BESIDE_MATMULS = ("v5e", "tpu7x")
_SCATTER_BESIDE_MATMULS = ("tpu7x",)
# TPUs whose compilers send both messages of a hop beside both of its matmuls; others send them beside the second one.
_MESSAGES_BESIDE_BOTH = ("v5e",)
# TPUs whose compilers copy the float32 sum of the weights' gradients after the hops of all_gather_matmul's ring.
_WEIGHT_SUM_COPIED = ("v6e",)


class Matmul(NamedTuple):
    """A collective matmul on one of n devices, by what one hop of a ring multiplies.

    In `all_gather_matmul` the message is [tokens, width], and its product with the weights [width, columns] stays. In
    `matmul_reduce_scatter` the rows [tokens, columns] stay, and the message is their product with [columns, width].
    """

    n: int
    tokens: int
    width: int
    columns: int
    value_bytes: int


class Forms(NamedTuple):
    """The forms of the forward and of the backward pass: "gather", "ring" or "bidirectional".

    In a backward pass both rings are one.
    """

    forward: str
    backward: str


class Seconds(NamedTuple):
    """Seconds by form, of the forward and of the backward pass; the simplest form is the first."""

    forward: dict[str, float]
    backward: dict[str, float]

    def fastest(self) -> Forms:
        """The forms that take the least time."""
        forward = min(self.forward, key=self.forward.__getitem__)
        backward = min(self.backward, key=self.backward.__getitem__)
        return Forms(forward, backward)


def all_gather_matmul_seconds(matmul: Matmul, chip: Chip) -> Seconds:
    """Seconds of the forms of `all_gather_matmul`."""
    times = _Times(matmul, chip)
    n, hops = matmul.n, matmul.n - 1
    product = times.product() + times.slices(1)  # the product is stored
    ring = n * product + hops * times.wait(product) + times.loop_copies()
    if times.are_merged:
        ring = times.whole() + n * times.slices(1) + times.hop
    forward = {"gather": times.whole() + times.gather, "ring": ring}
    if times.has_two_ways:
        halves = 2 * times.product(0.5)
        waiting = times.wait(halves, 0.5) + times.wait(halves + times.copy(times.message / 2), 0.5)
        forward["bidirectional"] = n * halves + hops * waiting + times.loop_copies()

    # A hop multiplies rows of the cotangent twice, and adds one product to the sum that arrives.
    token_sum = times.partial_sum()
    weight_sum = times.weight_sum()
    ring = n * (token_sum + times.slices(2)) + hops * (weight_sum + times.addition()) + times.last_weight_sum()
    if chip.name in _WEIGHT_SUM_COPIED:
        ring += times.copy(times.widening * times.weights)
    backward = {
        "gather": 2 * times.whole() + times.scatter_passes() + times.gather_and_scatter_exposed(),
        "ring": ring + hops * times.wait_for_both(token_sum, weight_sum, 1.0) + times.loop_copies(),
    }
    return Seconds(forward, backward)


def matmul_reduce_scatter_seconds(matmul: Matmul, chip: Chip) -> Seconds:
    """Seconds of the forms of `matmul_reduce_scatter`."""
    times = _Times(matmul, chip)
    n, hops = matmul.n, matmul.n - 1
    product = times.partial_sum()
    forward = {
        "gather": times.whole() + times.scatter_passes() + times.scatter,
        "ring": n * (product + times.slices(1)) + hops * (times.addition() + times.wait(product)),
    }
    if times.has_two_ways:
        # No compiler slices half of a device's rows inside of a matmul, and the halves are put together.
        half = times.partial_sum(0.5)
        sliced = times.copy(times.part)
        waiting = times.wait_for_both(half, half + sliced, 0.5)
        forward["bidirectional"] = n * (2 * half + sliced) + hops * (times.addition() + waiting)
        forward["bidirectional"] += times.copy(times.message)

    hop = times.product() + times.slices(2)  # rows are sliced for one matmul, those of the other's result stored
    weight_sum = times.weight_sum()
    ring = n * hop + hops * weight_sum + times.last_weight_sum() + times.transposition()
    backward = {
        "gather": 2 * times.whole() + times.gather,
        "ring": ring + hops * times.wait(hop + weight_sum) + times.loop_copies(),
    }
    return Seconds(forward, backward)


def is_mostly_latency(matmul: Matmul, chip: Chip) -> bool:
    """Whether a message takes less time on a link than the latency, which the seconds of the forms leave out."""
    link = links(chip).link
    return matmul.tokens * matmul.width * matmul.value_bytes < link.latency * link.bandwidth


class _Times:
    """Seconds of the parts that the forms are made of."""

    def __init__(self, matmul: Matmul, chip: Chip):
        self.matmul = matmul
        self.chip = chip
        # Bytes: of a message, of the activations that stay, of the weights.
        self.message = matmul.tokens * matmul.width * matmul.value_bytes
        self.part = matmul.tokens * matmul.columns * matmul.value_bytes
        self.weights = matmul.width * matmul.columns * matmul.value_bytes
        self.widening = max(1.0, _SUM_BYTES / matmul.value_bytes)  # of a value that becomes a partial sum
        self.has_loop = matmul.n > 2  # the compilers unroll the one hop between two devices
        self.has_two_ways = chip.torus > 0 and matmul.n > 2  # through a switch both share one link
        size = self.message + self.part + self.weights
        self.are_merged = not chip.torus and not self.has_loop and size < _MERGED_BYTES
        group = _find_group(chip, matmul.n)
        messages = matmul.n - 1
        self.hop = link_of_group(chip, "ppermute", group).seconds(self.message)
        self.gather = link_of_group(chip, "all_gather", group).seconds(messages * self.message)
        self.scatter_habit = _find_scatter_habit(chip, group, matmul)
        self.scatter = self.scatter_habit.sent * self.gather + self.scatter_habit.moved * self.hop

    def copy(self, size: float) -> float:
        """To read so many bytes and to write them."""
        return 2 * size / self.chip.hbm_bandwidth

    def multiply(self, share: float, size: float) -> float:
        """The matmul of a share of a hop's tokens, which reads and writes so many bytes."""
        flops = 2 * share * self.matmul.tokens * self.matmul.width * self.matmul.columns
        return max(flops / self.chip.flops, size / self.chip.hbm_bandwidth)

    def whole(self) -> float:
        """One matmul of the tokens of all devices."""
        n = self.matmul.n
        return self.multiply(n, n * (self.message + self.part) + self.weights)

    def product(self, share: float = 1.0) -> float:
        """The matmul of a hop, or of a share of its tokens."""
        return self.multiply(share, share * (self.message + self.part) + self.weights)

    def partial_sum(self, share: float = 1.0) -> float:
        """The same, where the message is the product, in float32."""
        return self.multiply(share, share * (self.widening * self.message + self.part) + self.weights)

    def weight_sum(self) -> float:
        """The matmul of message and part; in a loop it is added to a sum of the size of the weights."""
        wide = self.widening * self.weights
        passes = 1
        if self.has_loop:
            passes = 2
        return self.multiply(1, self.message + self.part + passes * wide)

    def last_weight_sum(self) -> float:
        """The last of these, cast to the operands' dtype; on GPUs in a kernel after it, and zeros before a loop."""
        wide = self.widening * self.weights
        last = self.message + self.part + wide
        if self.chip.torus:
            return self.multiply(1, last + self.weights)
        passes = 2
        if self.has_loop:
            passes = 3
        return self.multiply(1, last) + (passes * wide + self.weights) / self.chip.hbm_bandwidth

    def addition(self) -> float:
        """To add a product in float32 to the message that arrives, for the message that is sent."""
        return (self.widening + 2) * self.message / self.chip.hbm_bandwidth

    def slices(self, count: int) -> float:
        """To slice a hop's rows, or to store them, so many times; TPUs do it inside of the matmul."""
        if self.chip.torus:
            return 0.0
        return count * self.copy(self.part)

    def loop_copies(self) -> float:
        """A loop copies what it sends."""
        if not self.has_loop:
            return 0.0
        return self.matmul.n * self.copy(self.message)

    def scatter_passes(self) -> float:
        """The passes over memory of a reduce_scatter."""
        return self.scatter_habit.passes * self.message / self.chip.hbm_bandwidth

    def transposition(self) -> float:
        """The weights are transposed before a loop that needs them so; one matmul takes them as they are."""
        if not self.has_loop:
            return 0.0
        return self.copy(self.weights)

    def gather_and_scatter_exposed(self) -> float:
        """What is left of a gather beside the matmul that needs no gather, and of a scatter beside the other one."""
        gather, scatter = self.gather, self.scatter
        if not self.chip.torus:
            return max(0.0, gather - self.whole()) + max(0.0, scatter - self.whole())
        if self.chip.name in _GATHER_BESIDE_MATMULS:
            gather = max(0.0, gather - self.whole()) + self.copy(self.message)
        if self.chip.name in _SCATTER_BESIDE_MATMULS:
            scatter = max(0.0, scatter - self.whole())
        return gather + scatter

    def wait(self, beside: float, share: float = 1.0) -> float:
        """What is left of a message, or of a share that goes one of two ways, after so much compute beside it."""
        return max(0.0, share * self.hop - beside)

    def wait_for_both(self, first: float, second: float, share: float) -> float:
        """What is left of two messages in opposite directions after two matmuls; reports add up both.

        A switch sends one after the other. On a torus one of them is still under way while the sum of the other is
        added.
        """
        if not self.chip.torus:
            return self.wait(first, share) + self.wait(second, share)
        beside = second
        if self.chip.name in _MESSAGES_BESIDE_BOTH:
            beside += first
        return self.wait(beside, share) + self.wait(beside + share * self.addition(), share)


class _ScatterHabit(NamedTuple):
    """How a compiler runs a reduce_scatter.

    How often it sends all bytes, its passes over a message in memory, and the share of a message that it then moves to
    a neighbour.
    """

    sent: int
    passes: int
    moved: float = 0.0


def _find_scatter_habit(chip: Chip, group: Group, matmul: Matmul) -> _ScatterHabit:
    """That of the chip's compiler; `report.differences()` of `aot.compile` names what it makes of one."""
    if not chip.torus:
        return _ScatterHabit(sent=1, passes=0)
    if group.dims == 3 or matmul.n > 8:
        return _ScatterHabit(sent=2, passes=2)  # an all_reduce, of whose result each device copies its part
    if matmul.n > 4 and (matmul.tokens <= 512 or matmul.width >= 8192):
        return _ScatterHabit(sent=1, passes=0)
    # Padded to whole tiles: all sums are read once more, and rows that belong to a neighbour are moved, up to 0.38 of a
    # message.
    return _ScatterHabit(sent=1, passes=matmul.n + 5, moved=0.25)


def _find_group(chip: Chip, n: int) -> Group:
    """Where n devices of an axis stand: on the most cubic torus of n chips, or on as few hosts as possible.

    A program that is traced does not know more. 8 of a v5e are 2 x 4, of a v5p 2 x 2 x 2.
    """
    if not chip.torus:
        if n <= chip.host:
            return Group()
        return Group(members_on_a_host=chip.host)
    # A dimension for each prime factor, up to those of the torus: 8 is 2 x 2 x 2, and 2 x 4 where there are two.
    dims = 0
    factor = 2
    while n > 1:
        if n % factor:
            factor += 1
        else:
            n //= factor
            dims += 1
    return Group(dims=max(1, min(chip.torus, dims)))
