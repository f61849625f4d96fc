"""What a device computes in a transformer's train step, operation by operation, and the seconds that it takes.

An operation takes the longer of its FLOPs and the bytes of its operands and results, as `cost.roofline` has it. A
matmul is one; so is each loop over elements that reads its operands and writes its results once. What `jax.checkpoint`
repeats is counted as often as it runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from shardkit.layers.attention_kernel import count_costs
from shardkit.layers.attention_kernel_tpu import LANES, choose_block
from shardkit.layers.tiles import TileSizes, count_tiles
from shardkit.planner.habits import Habits, habits_of
from shardkit.planner.layout import Layout
from shardkit.planner.machine import Machine
from shardkit.planner.memory import count_saved
from shardkit.planner.model import Model
from shardkit.planner.share import Share
from shardkit.planner.sizes import Sizes, count_sizes


class OperationCost(NamedTuple):
    """The work of one operation.

    Attributes:
        flops: FLOPs of its matmul.
        moved: bytes of its operands and results.
    """

    flops: float
    moved: float


def time_operations(share: Share, machine: Machine) -> float:
    """Seconds of a step's operations on a device, without the waste of a pipeline."""
    micro = share.model.layers * time_layer(share, machine) + _time_tables(share, machine)
    if share.passes > 1:
        micro += _time([OperationCost(0, 12 * _count_gradients(share))], machine)  # two terms and a sum, in float32
    seconds = share.passes * micro + time_update(share, machine)
    if share.layout.stage > 1:
        seconds += share.passes * _time_stage_forward(share, machine)
    return seconds


def time_layer(share: Share, machine: Machine) -> float:
    """Seconds of one layer's operations in a microbatch: the same for many layouts of a search."""
    layout = share.layout
    # Weights are gathered if there are fsdp ways, however many; how they are copied further does not matter.
    alike = Layout(
        fsdp=min(layout.fsdp, 2),
        tensor=layout.tensor,
        remat=layout.remat,
        context=layout.context,
        expert=layout.expert,
    )
    return _time_layer(share._replace(layout=alike, passes=1), machine, habits_of(machine.chip))


@lru_cache(maxsize=4096)
def _time_layer(share: Share, machine: Machine, habits: Habits) -> float:
    """Seconds of one layer's operations in a microbatch, forward and backward, with what remat repeats.

    Worked example: a matmul of x[t, D] with w[D, F] takes 2 t D F FLOPs. Backward there are two of the same size, of
    its output's gradient with w and with x. Under "full" the first is repeated: four in all, where "none" has three.
    """
    sizes = count_sizes(share)
    stream = sizes.stream / share.layout.tensor
    heads = sizes.queries + sizes.keys
    experts = _count_experts(share)
    products = [*_count_products(share), *experts]
    # Norms, residuals, rotations and the activation, in bfloat16, each operand read and each result written once: ten
    # arrays of the stream's size, two of queries and of keys, and one and a half of gate and up.
    elementwise = OperationCost(0, 20 * stream + 4 * heads + 3 * sizes.inner)
    # Their gradients, those of norms partly in float32.
    elementwise_backward = OperationCost(0, 32 * stream + 4 * heads + 8 * sizes.inner)
    # Rows of experts moved to their places, back, and summed with their gates; their gradients move as much.
    routing = OperationCost(0, habits.routing * sizes.rows)
    gradients = OperationCost(0, habits.weight_gradient * sizes.layer)
    # A scan fills the stack of what all layers save with zeros, writes into it, and reads from it.
    saved = OperationCost(0, (3 + habits.saved) * count_saved(share, share.layout.remat))

    repeated: list[OperationCost] = []
    if share.layout.remat == "selective":
        repeated = experts
    elif share.layout.remat == "full":
        repeated = [*products[:-1], elementwise]  # not the last matmul, whose result nothing needs
    forward = [*products, elementwise, saved, routing]
    recomputation = [*repeated, routing]
    backward = [*products, *products, elementwise_backward, gradients, routing]
    return _time([*forward, *recomputation, *backward], machine) + time_attention(share, machine)


def time_attention(share: Share, machine: Machine) -> float:
    """Seconds of one layer's attention in a microbatch: products, softmax, and what remat repeats.

    A device's tokens are compared with its own, and in a ring with those of all of its context ways, in the tiles of
    zigzag order. A ring's backward pass computes the scores again.
    """
    ways = share.layout.context
    repeats = share.layout.remat != "none"
    sums = _time([_count_ring_sums(share, machine.platform, repeats)], machine)
    if share.model.kernel:
        return _time(_list_kernels(share, machine.platform, repeats), machine) + sums
    sizes = count_sizes(share)
    habits = habits_of(machine.chip)
    softmax = _count_softmax(sizes, share.model, habits)
    operations = [*softmax, *_count_softmax_backward(sizes, share.model, habits)]
    if repeats:
        operations += softmax
    elif ways > 1:
        operations.append(softmax[0])
    # The operations are those of all of a device's queries and as many keys; a tile on the diagonal is computed whole.
    tiles = count_tiles(ways)
    blocks = (tiles.diagonal + tiles.whole) / tiles.parts**2
    return blocks * _time(operations, machine) + sums


def _count_ring_sums(share: Share, platform: str, repeats: bool) -> OperationCost:
    """What a ring reads and writes in float32 to sum up its tiles, which attention on one device does not.

    Of each query forward the running sum, read and written, and the tile's part of it, written and read: 16 bytes an
    element. Backward the same of the queries' gradients, of the keys' and of the values', which each query head has of
    its own before they are summed. A TPU's kernel also reads the largest score, the sum and the inner product of each
    query as rows as wide as a register, or a block.

    Worked example: a ring of four devices in zigzag order. Its nine tiles have half of the queries each, so that every
    element is summed four and a half times.
    """
    ways = share.layout.context
    if ways == 1:
        return OperationCost(0, 0)
    tiles = count_tiles(ways)
    times = (tiles.diagonal + tiles.whole) / tiles.parts
    forwards = 2 if repeats else 1
    element: float = 16 * forwards + 3 * 16
    if share.model.kernel and platform == "tpu":
        block = choose_block(share.sequence // tiles.parts, share.model.head, itemsize=2)
        element += 4 * (2 * LANES + block) / share.model.head
    return OperationCost(0, times * element * count_sizes(share).queries)


def _list_kernels(share: Share, platform: str, repeats: bool) -> list[OperationCost]:
    """The kernels of one layer's attention in a microbatch, those of each tile."""
    tiles = count_tiles(share.layout.context)
    sizes = TileSizes(
        heads=int(share.batch * share.model.heads / share.layout.tensor),
        key_heads=int(share.batch * share.model.key_heads / share.layout.tensor),
        tokens=share.sequence // tiles.parts,
        head=share.model.head,
        itemsize=2,
    )
    operations = []
    for causal, count in ((True, tiles.diagonal), (False, tiles.whole)):
        kernels = list(count_costs(platform, sizes, causal=causal))
        if repeats:
            kernels.append(kernels[0])  # that of the result
        operations += [OperationCost(count * kernel.flops, count * kernel.moved) for kernel in kernels]
    return operations


def _time(operations: Iterable[OperationCost], machine: Machine) -> float:
    flops_per_second = machine.chip.flops * machine.efficiency
    seconds = 0.0
    for operation in operations:
        seconds += max(operation.flops / flops_per_second, operation.moved / machine.chip.hbm_bandwidth)
    return seconds


def _time_tables(share: Share, machine: Machine) -> float:
    """Seconds of the head and its loss in a microbatch, forward and backward.

    The lookup of the embedding reads a row for each token, and its gradient adds one, which is little beside the head.
    """
    sizes = count_sizes(share)
    product = 2 * sizes.logits * share.model.hidden
    return _time(
        [
            OperationCost(product, 4 * sizes.logits),  # the logits in float32
            OperationCost(0, 4 * sizes.logits),  # read for the sum of their exponentials
            OperationCost(0, 6 * sizes.logits),  # read for their gradient, which is written in bfloat16
            OperationCost(product, 2 * sizes.logits),  # the gradient of the stream
            OperationCost(product, 2 * sizes.logits + 4 * sizes.table),  # and that of the head, in float32
        ],
        machine,
    )


def time_update(share: Share, machine: Machine) -> float:
    """Seconds of what happens once a step."""
    sizes = count_sizes(share)
    layer_parts = share.model.layers * sizes.layer / share.layout.fsdp
    table_parts = sizes.tables * sizes.table / share.layout.fsdp
    cast = OperationCost(0, (4 + 2) * layer_parts)
    # Adam reads a gradient and three values of a parameter, and writes three, in float32.
    adam = OperationCost(0, 7 * 4 * (layer_parts + table_parts))
    return _time([cast, adam], machine)


def _time_stage_forward(share: Share, machine: Machine) -> float:
    """Seconds of a stage's forward pass at the peak; its backward pass begins with one, from the saved input."""
    whole_sequence = share.sequence * share.layout.context
    flops = share.tokens * share.model.flops(whole_sequence) / share.layout.tensor
    return flops / (machine.chip.flops * machine.efficiency)


def _count_gradients(share: Share) -> float:
    """Elements of the sums of gradients: those of embedding and head are whole until the step's end."""
    sizes = count_sizes(share)
    return share.model.layers * sizes.layer / share.layout.fsdp + sizes.tables * sizes.table


def _count_products(share: Share) -> list[OperationCost]:
    """The matmuls of queries, keys, values and output, and of a feed-forward layer without experts."""
    model = share.model
    sizes = count_sizes(share)
    # Elements of the operand and the result: tokens times either side of a matrix. Their product is the matrix times
    # the tokens squared.
    ends = [
        (sizes.stream, sizes.queries),
        (sizes.stream, sizes.keys),
        (sizes.stream, sizes.keys),
        (sizes.queries, sizes.stream),
    ]
    if not sizes.rows:
        columns = 2 if model.gated else 1
        width = sizes.inner / columns
        ends += [(sizes.stream, width)] * columns
        ends.append((width, sizes.stream))
    products = []
    for operand, result in ends:
        matrix = operand * result / share.tokens**2
        products.append(OperationCost(2 * matrix * share.tokens, 2 * (operand + matrix + result)))
    return products


def _count_experts(share: Share) -> list[OperationCost]:
    """The matmuls of a device's experts, each with all their weights."""
    model = share.model
    sizes = count_sizes(share)
    if not sizes.rows:
        return []
    rows = sizes.rows / model.hidden + share.tokens * model.shared / share.layout.tensor
    flops = 2 * rows * model.hidden * model.expert_width
    moved = 2 * (rows * (model.hidden + model.expert_width) + sizes.largest)
    matrices = 3 if model.gated else 2
    return [OperationCost(flops, moved)] * matrices


def _count_softmax(sizes: Sizes, model: Model, habits: Habits) -> list[OperationCost]:
    """Scores, their softmax, and its product with the values; the attention of `models.transformer` is not blocked."""
    scores = sizes.scores
    product = 2 * scores * model.head
    return [
        OperationCost(product, (4 + habits.attention_mask) * scores),  # masked, and written in float32
        OperationCost(0, 4 * scores),  # read for the sum of their exponentials
        OperationCost(0, 6 * scores),  # read for the weights, which are written in bfloat16
        OperationCost(product, 2 * scores),
        OperationCost(0, habits.score_pass * scores),
    ]


def _count_softmax_backward(sizes: Sizes, model: Model, habits: Habits) -> list[OperationCost]:
    """Four products; the first reads the weights and writes the gradient of the scores."""
    scores = sizes.scores
    product = 2 * scores * model.head
    return [
        OperationCost(product, 4 * scores),
        OperationCost(0, habits.score_pass_backward * scores),
        OperationCost(product, 2 * scores),
        OperationCost(product, 2 * scores),
        OperationCost(product, 2 * scores),
    ]
