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
# How often a layer gathers or scatters its activations over tensor: four times forward, six backward, and again.
EXCHANGES = {"none": 10, "selective": 11, "full": 13}


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
    ends += [*[(size.width, wide / inner)] * inner, (wide / inner, size.width)]
    # tokens times either side of a matrix, of which one is a part: their product is the matrix times tokens squared
    matmuls = [(2 * a * b / size.tokens, 2 * (a + a * b / size.tokens**2 + b)) for a, b in ends]
    # norms, residuals, rotations and the activation: each reads its operands and writes its result once, in bfloat16
    around = (0, 20 * stream + 4 * (heads + keys) + 3 * wide)
    softmax, back = _attention(size, model, chip)
    # What is saved goes into the stack of all layers, filled with zeros before, and is copied out; on GPUs also in.
    stack = (0, (3 if chip.torus else 5) * saved(size, layout, layout.remat))
    back += [(0, 32 * stream + 4 * (heads + keys) + 8 * wide)]
    # of a whole layer all but the last matmul, whose result nothing needs
    again = {"none": [], "selective": softmax, "full": [*matmuls[:-1], *softmax, around]}[layout.remat]
    return [*matmuls, *softmax, around, stack, *matmuls, *matmuls, *back, *again]


def sent(model: Model, layout: Layout, batch: int, sequence: int) -> dict[str, float]:
    """Bytes that a device sends in a step, by the kind of ways; `batch` is of a microbatch on it.

    fsdp gathers a layer twice in each microbatch (bfloat16) and scatters its gradient (float32); embedding, head and
    last norm once a step. data sums what is left of all gradients, with tensor the gains of the norms, which all its
    devices have; and the loss and the accuracy, of 16 bytes. tensor gathers or scatters a microbatch's activations,
    four times for embedding and head and in a layer as `EXCHANGES` says, and sums four floats a token for the loss.
    """
    data, fsdp, tensor, accumulate, remat = layout[:5]
    size = sizes_of(model, layout, batch, sequence)
    layers, tables = model.layers * (size.layer + 2 * model.hidden), size.tables * size.table
    exchanged = 4 + model.layers * EXCHANGES[remat]
    summed = 4 * (model.layers * size.matrices + tables) / fsdp
    copies = data * layout.expert  # of all leaves but the experts
    return {
        "data": 2 * (1 - 1 / copies) * summed
        + 2 * (1 - 1 / data) * 4 * model.layers * size.experts / fsdp
        + 2 * (1 - 1 / (copies * tensor)) * 4 * size.gains / fsdp
        + 2 * (1 - 1 / (data * fsdp)) * 16,
        "fsdp": (1 - 1 / fsdp) * (accumulate * (2 * 2 + 4) * layers + (2 + 4) * (tables + model.hidden)),
        "tensor": accumulate * (1 - 1 / tensor) * (2 * size.width * exchanged + 2 * 16 * size.tokens),
    }
