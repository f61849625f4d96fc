"""What a device computes, moves and sends in a transformer's train step, matmul by matmul and collective by collective.

An operation takes the longer of its FLOPs and the bytes of its operands and results; `aot` also counts copies.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardkit import cost
from shardkit.planner.candidates import Layout
from shardkit.planner.memory import Sizes, saved, sizes_of
from shardkit.planner.model import Model

Work = tuple[float, float]  # FLOPs and bytes of an operation
# Bytes moved for an element of the rows of experts: to their places, back, and summed with their gates; and backward.
_FORTH, _BACK = 16, 40
_OF_BOTH = {"none": 10, "selective": 11, "full": 13}
_OF_ATTENTION = {"none": 5, "selective": 6, "full": 7}


def computing(
    model: Model, layout: Layout, chip: cost.Chip, batch: int, sequence: int, efficiency: float, *, ring: bool = False
) -> float:
    """Seconds of a step's operations on a device; `batch` is of a microbatch on it, `ring` as for `sizes_of`."""
    size = sizes_of(model, layout, batch, sequence, ring)
    parts = model.layers * size.layer / layout.fsdp
    whole = size.tables * size.table

    def seconds(works: Iterable[Work]) -> float:
        return _seconds(works, chip, efficiency)

    product, logits = 2 * size.logits * model.hidden, size.logits
    head = [(product, 4 * logits), (0, 4 * logits), (0, 6 * logits), (product, 2 * logits)]
    # zeros, to which the tokens' gradients of the embedding are added, and their cast to float32
    tables = [(product, 2 * logits + 4 * size.table), (0, (2 + 2 + 6) * size.table)]
    micro = model.layers * seconds(_layer(size, model, layout, chip)) + seconds([*head, *tables])
    if layout.accumulate > 1:
        micro += seconds([(0, 12 * (parts + whole))])  # two terms and a sum, in float32
    # the layers' parts are cast; Adam reads a gradient and three values of a parameter, and writes three
    once = seconds([(0, 6 * parts), (0, 28 * (parts + whole / layout.fsdp))])
    return layout.accumulate * micro + once


def attention(model: Model, layout: Layout, chip: cost.Chip, batch: int, sequence: int, efficiency: float) -> float:
    """Seconds of one layer's scores on a device, forward and backward: products, softmax, and what remat repeats."""
    softmax, back = _attention(sizes_of(model, layout, batch, sequence), model, chip)
    again = [] if layout.remat == "none" else softmax
    return _seconds([*softmax, *back, *again], chip, efficiency)


def _seconds(works: Iterable[Work], chip: cost.Chip, efficiency: float) -> float:
    return sum(max(flops / (chip.flops * efficiency), moved / chip.hbm_bandwidth) for flops, moved in works)


def _attention(size: Sizes, model: Model, chip: cost.Chip) -> tuple[list[Work], list[Work]]:
    """Scores, softmax and their product with values, forward and backward."""
    product, S = 2 * size.scores * model.head, size.scores
    # Scores are written in float32, and read for the sum of their exponentials and for the weights; on GPUs also for
    # their maximum, which the TPU's compiler takes where it makes them.
    softmax = [(product, 4 * S), (0, 4 * S), (0, 6 * S), (product, 2 * S)] + ([] if chip.torus else [(0, 4 * S)])
    # weights and their gradient make that of the scores: on TPUs in one loop with the matmul, on GPUs after it
    back = [(product, 4 * S)] if chip.torus else [(product, 4 * S), (0, 8 * S)]
    back += [(product, 2 * S)] * 3
    return softmax, back


def _layer(size: Sizes, model: Model, layout: Layout, chip: cost.Chip) -> list[Work]:
    """One layer, forward and backward."""
    stream, heads, keys, wide = size.width / layout.tensor, size.heads, size.keys, size.wide
    inner = 2 if model.gated else 1
    ends = [(size.width, heads), (size.width, keys), (size.width, keys), (heads, size.width)]
    if not size.routed:
        ends += [*[(size.width, wide / inner)] * inner, (wide / inner, size.width)]
    # tokens times either side of a matrix, of which one is a part: their product is the matrix times tokens squared
    matmuls = [(2 * a * b / size.tokens, 2 * (a + a * b / size.tokens**2 + b)) for a, b in ends]
    experts = _experts(size, model, inner)
    matmuls += experts
    moved, moved_back = (0, _FORTH * size.routed), (0, _BACK * size.routed)
    # norms, residuals, rotations and the activation: each reads its operands and writes its result once, in bfloat16
    around = (0, 20 * stream + 4 * (heads + keys) + 3 * wide)
    softmax, back = _attention(size, model, chip)
    # What is saved goes into the stack of all layers, filled with zeros before, and is copied out; on GPUs also in.
    stack = (0, (3 if chip.torus else 5) * saved(size, layout, layout.remat))
    back += [(0, 32 * stream + 4 * (heads + keys) + 8 * wide)]
    # of a whole layer all but the last matmul, whose result nothing needs
    again = {"none": [], "selective": [*softmax, *experts], "full": [*matmuls[:-1], *softmax, around]}[layout.remat]
    again += [moved]
    return [*matmuls, *softmax, around, stack, *matmuls, *matmuls, *back, *again, moved, moved_back]


def _experts(size: Sizes, model: Model, inner: int) -> list[Work]:
    """The matmuls of a device's experts, each with all their weights."""
    if not size.routed:
        return []
    each = model.width if model.expert_ffn is None else model.expert_ffn
    rows = size.routed / model.hidden + size.tokens * model.shared
    product = (2 * rows * model.hidden * each, 2 * (rows * (model.hidden + each) + size.largest))
    return [product] * (inner + 1)


def exchanges_of(model: Model, remat: str) -> int:
    """How often a layer gathers or scatters its activations over tensor: four times forward, six backward, and again.

    Experts take the tokens as sequence parallelism splits them, so that attention alone does.
    """
    return (_OF_ATTENTION if model.experts else _OF_BOTH)[remat]


def exchanged(model: Model, layout: Layout, batch: int, sequence: int, *, again: bool) -> float:
    """Bytes that a device sends to exchange rows of experts, of one layer and microbatch.

    Two exchanges forward, two backward, and two where it computes the layer `again`: of all places, or of the rows
    alone where there are none; what says how many those are is left out.
    """
    tokens, ways = batch * sequence // layout.tensor, layout.expert
    if ways == 1:
        return 0.0
    rows = model.rows(tokens, sequence // layout.tensor)  # those that leave a device, as many as one alone would have
    return (6 if again else 4) * 2 * rows * model.hidden * (1 - 1 / ways)


def sent(model: Model, layout: Layout, batch: int, sequence: int) -> dict[str, float]:
    """Bytes that a device sends in a step, by the kind of ways; `batch` is of a microbatch on it.

    fsdp gathers a layer twice in each microbatch (bfloat16) and scatters its gradient (float32); embedding, head and
    last norm once a step. data sums what is left of all gradients, with tensor the gains of the norms, which all its
    devices have; and the loss and the accuracy, of 16 bytes. tensor gathers or scatters a microbatch's activations,
    four times for embedding and head and in a layer as `exchanges_of` says, and sums four floats a token for the loss.
    expert exchanges rows; with experts, data also sums how balanced they are, in each layer forward and backward.
    """
    data, fsdp, tensor, accumulate, remat = layout[:5]
    size = sizes_of(model, layout, batch, sequence)
    whole = size.gains - model.hidden  # of the layers' leaves, those that tensor ways do not split
    layers, tables = model.layers * size.layer + whole, size.tables * size.table
    exchanges = 4 + model.layers * exchanges_of(model, remat)
    summed = 4 * (model.layers * size.matrices + tables) / fsdp
    copies = data * layout.expert  # of all leaves but the experts
    again = remat != "none" or fsdp > 1
    # of each layer its balance, forward and where it is repeated, and once a step what was dropped
    balance = accumulate * (2 if again else 1) * model.layers * 8 * (model.experts + 1) + 8 if model.experts else 0
    scalars = 16 + (4 * batch * accumulate if model.experts else 0)
    every = copies * fsdp
    return {
        "data": 2 * (1 - 1 / copies) * summed
        + 2 * (1 - 1 / (data * tensor)) * 4 * model.layers * size.experts / fsdp
        + 2 * (1 - 1 / (copies * tensor)) * 4 * size.gains / fsdp
        + 2 * (1 - 1 / (every * tensor)) * balance
        + 2 * (1 - 1 / every) * scalars,
        "fsdp": (1 - 1 / fsdp) * (accumulate * (2 * 2 + 4) * layers + (2 + 4) * (tables + model.hidden)),
        "tensor": accumulate * (1 - 1 / tensor) * (2 * size.width * exchanges + 2 * 16 * size.tokens),
        "expert": accumulate * model.layers * exchanged(model, layout, batch, sequence, again=again),
    }
