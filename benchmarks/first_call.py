"""What the checks of a step's first call add to it: the rules on the trace, and whether the loss mixes examples.

The step of the reference transformer on eight simulated devices, compiled as users compile. `step` is the whole first
call without checks: trace, compile and run. A loss whose trace does not show that it adds is compiled too, twice the
batch and without gradients: "sorted" sorts its losses. One that sends over the batch is compiled for one device,
without gradients: "sending" sums its total and weight by itself, "ring" has ring attention.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardkit as sk
from benchmarks.start import choose_rounds, start
from shardkit.models import transformer

Loss = Callable[[Any, Any, Any], Any]


def keep(model: Loss) -> Loss:
    """The transformer's own loss."""
    return model


def sort_losses(model: Loss) -> Loss:
    """A loss that sorts: from its trace nobody sees that it adds up what examples give."""

    def loss(params: Any, batch: Any, keys: Any) -> sk.Mean:
        def compute_total(example: Any) -> jax.Array:
            batch_of_one = jax.tree.map(lambda x: x[None], example)
            mean, _ = model(params, batch_of_one, None)
            return mean.total

        return sk.Mean.of(jnp.sort(jax.vmap(compute_total)(batch)))

    return loss


def send_sums(model: Loss) -> Loss:
    """A loss that sums its total and weight over the batch by itself."""

    def loss(params: Any, batch: Any, keys: Any) -> sk.Mean:
        mean, _ = model(params, batch, keys)
        return sk.Mean(sk.all_reduce(mean.total, "data"), sk.all_reduce(mean.weight, "data"))

    return loss


class Row(NamedTuple):
    """A plan over eight devices, and a loss made of the transformer's."""

    name: str
    plan: sk.Plan
    axis: str = "data"
    make_loss: Callable[[Loss], Loss] = keep


ROWS = (
    Row("dp", sk.dp("data")),
    Row("fsdp by layer", sk.fsdp("data", layerwise=("layers",), min_size=1)),
    Row("dp, sorted", sk.dp("data"), make_loss=sort_losses),
    Row("dp, sending", sk.dp("data"), make_loss=send_sums),
    Row("cp, ring", sk.cp("context"), axis="context"),
)


def time_first_call(row: Row, layers: int, dim: int, check: bool) -> float:
    """CPU seconds of a first call, of what jax has not seen before."""
    # Without this, the second step of a row would find the traces and programs of the first one.
    jax.clear_caches()
    config = transformer.Config(vocabulary=512, layers=layers, dim=dim, heads=4, hidden=4 * dim)
    axes = transformer.Axes()
    if row.axis == "context":
        axes = transformer.Axes(context="context")
    loss_fn = row.make_loss(transformer.loss_fn(config, axes))
    mesh = sk.make_mesh(**{row.axis: 8})
    init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.adam(1e-3), mesh=mesh, plan=row.plan, check=check)
    state = init(lambda key: transformer.init(key, config), jax.random.key(0))
    tokens = np.zeros((16, 64), np.int32)
    batch = {"tokens": tokens, "targets": tokens}
    # CPU time, as the compiler takes most of it: on a loaded machine the clock would show the load.
    start_time = time.process_time()
    jax.block_until_ready(step(state, batch))
    return time.process_time() - start_time


def main(argv: Sequence[str] | None = None) -> None:
    """Times `--rounds` first calls with and without checks, in turn."""
    options = start(__doc__, argv)
    rounds = choose_rounds(options, 3, smoke=1)
    layers = 8
    dim = 256
    if options.smoke:
        layers = 1
        dim = 16
    print("| plan | step, CPU s | with checks, CPU s | share |\n|---|---|---|---|")
    for row in ROWS:
        without_checks = []
        with_checks = []
        # In turn, so that what slows the machine down for a while slows both.
        for _ in range(rounds):
            without_checks.append(time_first_call(row, layers, dim, check=False))
            with_checks.append(time_first_call(row, layers, dim, check=True))
        plain = float(np.median(without_checks))
        checked = float(np.median(with_checks))
        share = 100 * (checked / plain - 1)
        print(f"| {row.name} | {plain:.2f} | {checked:.2f} | {share:+.1f}% |", flush=True)


if __name__ == "__main__":
    main()
