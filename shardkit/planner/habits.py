"""What compilers hold, move, send and hide beyond what follows from a step: the few habits that predictions need.

All else in the planner is a formula of the model, the layout and the step as it is written. Each habit is one row here,
with its error: the mean of |log(predicted / compiled)| over the layouts of `benchmarks/planned.py` (41 of them, by jax
0.10.2, libtpu 0.0.42.1 and jax-cuda13-plugin 0.10.2), with the habit and without it. One is kept only where the error
without it is half as large again; a test computes that from the records. Twelve more layouts, drawn by lot, were
compiled after the habits were chosen: 10 of their 12 step times are within 10%.
"""

from __future__ import annotations

from typing import NamedTuple

from shardkit import cost


class Overlap(NamedTuple):
    """What a compiler sends while a device computes, without options; all else waits, or is waited for.

    Attributes:
        gathers: whether it gathers the weights of a layer beside the layer's compute.
        scatters: whether it scatters the gradients of a layer so.
        compute: the share of the compute that stands between the start and the end of those.
        sums: whether it sums gradients over data ways beside the optimizer's update.
    """

    gathers: bool = False
    scatters: bool = False
    compute: float = 0.0
    sums: bool = False


class Habits(NamedTuple):
    """The habits of one compiler, in bytes.

    Attributes:
        cast_layer: held for a whole step under fsdp, for each element of a device's parts of all layers.
        attention_mask: held for a whole step, and read in each forward pass, for each of attention's scores.
        score_gradient: held in a layer's backward pass, for each of attention's scores.
        score_pass: moved once more in a forward pass, for each of attention's scores.
        score_pass_backward: moved once more in a backward pass, for each of attention's scores.
        weight_gradient: moved in a layer's backward pass, for each element of its matrices.
        saved: how often more than on TPUs what a layer saves for its backward pass is moved.
        routing: moved in each pass through a layer, for each element of the rows of its experts.
        gradient_sum: sent over data ways, for each gradient of one microbatch without fsdp; as it is written a step
            sums 4 bytes. Those of several microbatches are sums in float32.
        scatter: sent over fsdp ways along three dims of a torus, for each byte of a scatter.
        overlap: what it hides.
    """

    cast_layer: int
    attention_mask: int
    score_gradient: int
    score_pass: int
    score_pass_backward: int
    weight_gradient: int
    saved: int
    routing: int
    gradient_sum: int
    scatter: int
    overlap: Overlap


TPU = Habits(
    # Casts the parts of all layers to bfloat16 once, before the loops over layers. Peak on TPUs: 0.020, without 0.057.
    cast_layer=2,
    attention_mask=0,
    score_gradient=0,
    score_pass=0,
    score_pass_backward=0,
    weight_gradient=0,
    saved=0,
    # Moves rows to their places, back, and sums them with their gates in fusions of their own, some in float32. Compute
    # of models with experts: 0.046, without 0.197. The records with experts are of TPUs.
    routing=28,
    # Sums gradients of bfloat16 compute in bfloat16, before the cast that the step has in front of its sum. Step of
    # layouts without fsdp: 0.023, without 0.059.
    gradient_sum=2,
    # Runs a reduce_scatter over all three dims of a v5p as an all_reduce. Step on v5p: 0.034, without 0.052.
    scatter=2,
    # The compilers of v5p and v6e run every collective alone, except for the permutes of a ring.
    overlap=Overlap(),
)
GPU = Habits(
    cast_layer=0,
    # Holds the mask as booleans and its constant in float32, which stand in front of the loops over layers. Peak on
    # GPUs: 0.029, without 0.076.
    attention_mask=5,
    # Writes the gradient of the weights of attention in float32; a TPU fuses it into the matmul behind it. Peak on
    # GPUs: 0.029, without 0.043.
    score_gradient=4,
    # Reads the scores for their maximum, which a TPU takes where it makes them. Compute on GPUs: 0.020, without 0.055.
    score_pass=4,
    # Reads the gradient of the weights, copies those that were saved, and writes, casts and reads the scores' gradient.
    # Compute on GPUs: 0.020, without 0.105.
    score_pass_backward=14,
    # Writes the gradients of matrices in float32 and copies them into the layout of the scatter. Compute on GPUs:
    # 0.020, without 0.076.
    weight_gradient=10,
    # Reads what it saves once more: a TPU writes it into the stack where it makes it. Compute on GPUs: 0.020, without
    # 0.029.
    saved=1,
    routing=28,
    gradient_sum=4,
    scatter=1,
    # Every collective starts as early and ends as late as its operands allow. Of a layer's compute nearly half stands
    # between: the first matmul waits for the first gather, and the last scatter for the last matmul. Step on GPUs:
    # 0.032, without 0.190.
    overlap=Overlap(gathers=True, scatters=True, compute=0.45, sums=True),
)
# What the compilers of single chips do otherwise. Step on v5e: 0.039, without 0.063.
_TPUS = {
    "v5e": TPU._replace(overlap=Overlap(gathers=True, compute=0.45)),
}


def habits_of(chip: cost.Chip) -> Habits:
    """The habits of the compiler of a chip."""
    if not chip.torus:
        return GPU
    return _TPUS.get(chip.name, TPU)
