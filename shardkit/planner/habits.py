"""What compilers hold and move beyond what follows from a step: the few habits without which predictions get worse.

All else in the planner is a formula of the model, the layout and the step as it is written. Each habit is one row here,
with its error: the mean of |log(predicted / compiled)| over the layouts of `benchmarks/planned.py` (41 of them, by jax
0.10.2, libtpu 0.0.42.1 and jax-cuda13-plugin 0.10.2), with the habit and without it. One is kept only where the error
without it is half as large again; a test computes that from the records. The order of the layouts' step times hardly
depends on them: Kendall's tau is 0.890, and 0.878 without any.
"""

from __future__ import annotations

from typing import NamedTuple

from shardkit import cost


class Habits(NamedTuple):
    """The habits of one compiler, in bytes.

    Attributes:
        cast_layer: held for a whole step under fsdp, for each element of a device's parts of all layers.
        attention_mask: held for a whole step, for each of attention's scores.
        score_gradient: held in a layer's backward pass, for each of attention's scores.
        score_pass: moved once more in a forward pass and twice more in a backward pass, for each of attention's scores.
        routing: moved in each pass through a layer, for each element of the rows of its experts.
    """

    cast_layer: int
    attention_mask: int
    score_gradient: int
    score_pass: int
    routing: int


TPU = Habits(
    # Casts the parts of all layers to bfloat16 once, before the loops over layers. Peak on TPUs: 0.020, without 0.057.
    cast_layer=2,
    attention_mask=0,
    score_gradient=0,
    score_pass=0,
    # Moves rows to their places, back, and sums them with their gates in fusions of their own, some in float32. Compute
    # of models with experts: 0.046, without 0.197. The records with experts are of TPUs.
    routing=28,
)
GPU = Habits(
    cast_layer=0,
    # Holds the mask as booleans and its constant in float32, which stand in front of the loops over layers. Peak on
    # GPUs: 0.029, without 0.076.
    attention_mask=5,
    # Writes the gradient of the weights of attention in float32; a TPU fuses it into the matmul behind it. Peak on
    # GPUs: 0.029, without 0.043.
    score_gradient=4,
    # Reads the scores for their maximum, which a TPU takes where it makes them, and writes and reads the gradient of
    # their weights. Compute on GPUs: 0.188, without 0.306.
    score_pass=4,
    routing=28,
)


def habits_of(chip: cost.Chip) -> Habits:
    """The habits of the compiler of a chip."""
    return TPU if chip.torus else GPU
