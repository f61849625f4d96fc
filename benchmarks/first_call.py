"""What the checks of a step's first call add to it: the rules on the trace, and whether the loss mixes examples.

The step of the reference transformer on eight simulated devices, compiled as users compile. `step` is the whole first
call without checks: trace, compile and run. A loss whose trace does not show that it adds is compiled too, twice the
batch and without gradients: "sorted" sorts its losses. One that sends over the batch is compiled for one device,
without gradients: "sending" sums its total and weight by itself, "ring" has ring attention.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardkit as sk
from benchmarks.start import start
from shardkit.models import transformer

PLANS: dict[str, tuple[dict[str, int], Callable[[], Any]]] = {
    "dp": ({"data": 8}, lambda: sk.dp("data")),
    "fsdp by layer": ({"data": 8}, lambda: sk.fsdp("data", layerwise=("layers",), min_size=1)),
    "dp, sorted": ({"data": 8}, lambda: sk.dp("data")),
    "dp, sending": ({"data": 8}, lambda: sk.dp("data")),
    "cp, ring": ({"context": 8}, lambda: sk.cp("context")),
}


def seconds(plan: str, layers: int, dim: int, check: bool) -> float:
    """CPU seconds of a first call, of what jax has not seen before."""
    jax.clear_caches()
    context = "context" if plan == "cp, ring" else None
    axes = transformer.Axes(context=context)
    config = transformer.Config(vocabulary=512, layers=layers, dim=dim, heads=4, hidden=4 * dim)
    model = transformer.loss_fn(config, axes)

    def loss(params: Any, batch: Any, keys: Any) -> Any:
        if plan == "dp, sending":
            mean, _ = model(params, batch, keys)
            return sk.Mean(sk.all_reduce(mean.total, "data"), sk.all_reduce(mean.weight, "data"))
        if plan != "dp, sorted":
            return model(params, batch, keys)

        def total(example: Any) -> jax.Array:
            return model(params, jax.tree.map(lambda x: x[None], example), None)[0].total

        return sk.Mean.of(jnp.sort(jax.vmap(total)(batch)))

    sizes, make = PLANS[plan]
    job = {"mesh": sk.make_mesh(**sizes), "plan": make(), "check": check}
    init, step = sk.make_train_step(sk.value_and_grad(loss), optax.adam(1e-3), **job)
    state = init(lambda key: transformer.init(key, config), jax.random.key(0))
    batch = {name: np.zeros((16, 64), np.int32) for name in ("tokens", "targets")}
    begun = time.process_time()
    jax.block_until_ready(step(state, batch))
    return time.process_time() - begun


def main(argv: Sequence[str] | None = None) -> None:
    """Times `--rounds` first calls with and without checks, in turn."""
    options = start(__doc__, argv)
    rounds = 1 if options.smoke else options.rounds or 3
    layers, dim = (1, 16) if options.smoke else (8, 256)
    print("| plan | step, CPU s | with checks, CPU s | share |\n|---|---|---|---|")
    for plan in PLANS:
        cpu: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(rounds):
            for check in cpu:
                cpu[check].append(seconds(plan, layers, dim, check))
        plain, checked = (float(np.median(cpu[check])) for check in (False, True))
        print(f"| {plan} | {plain:.2f} | {checked:.2f} | {100 * (checked / plain - 1):+.1f}% |", flush=True)


if __name__ == "__main__":
    main()
