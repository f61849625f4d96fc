"""DiLoCo beside data parallelism: loss after equal tokens, and the bytes over the slow axis.

Eight workers (simulated devices) train a small transformer on the bytes of Python's library, adamw inside, and exchange
every H steps: plain averages (sgd of rate 1 outside), or DiLoCo's Nesterov of rate 0.7 and momentum 0.9, not tuned.
`dp` takes the same batches in one step each. The loss is that of the parameters after the last exchange, on bytes that
no run has seen. Bytes are what one device sends over the axis of the workers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardkit as sk
from benchmarks.start import start
from shardkit.cli.text import batch_at, standard_library, validation_batches
from shardkit.meshes.layout import table
from shardkit.models import parameters, transformer

WORKERS, EACH, TOKENS = 8, 4, 64


def each_worker(batch: dict[str, np.ndarray], k: int) -> dict[str, np.ndarray]:
    """The examples of worker `k`."""
    return {name: x[k * EACH : (k + 1) * EACH] for name, x in batch.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Trains each form on the same batches and prints a line for it."""
    options = start(__doc__, argv, devices=WORKERS)
    steps = 4 if options.smoke else 1000
    config = transformer.Config(layers=2, dim=64, heads=4, vocabulary=256)
    text = standard_library()
    sizes = {"batch": WORKERS * EACH, "length": TOKENS}
    train = [batch_at(text.train, seed=1, step=number, **sizes) for number in range(steps)]
    unseen = validation_batches(text.validation, count=8, **sizes)
    loss_fn = transformer.loss_fn(config)
    grad_fn = sk.value_and_grad(loss_fn)
    params, key = parameters.init(jax.random.key(0), config), jax.random.key(1)
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    mean = jax.jit(lambda params, batch: jnp.divide(*loss_fn(params, batch, None)[0]))

    def worker(mesh: Any) -> sk.TrainStep:
        return sk.make_train_step(grad_fn, optax.adamw(3e-3), mesh=mesh, plan=sk.dp("data"))

    def on_unseen(params: Any) -> float:
        return float(np.mean([mean(jax.device_get(params), batch) for batch in unseen]))

    records, lines = [], [("form", "loss", "exchanges", "MB sent over the slow axis", "theory")]
    nesterov = optax.sgd(0.7, momentum=0.9, nesterov=True)
    forms = [(0, "", None), (1, "sgd(1)", optax.sgd(1.0))]
    forms += [(every, *outer) for every in (10, 50) for outer in (("sgd(1)", optax.sgd(1.0)), ("Nesterov", nesterov))]
    for every, by, outer in [forms[0], (2, "Nesterov", nesterov)] if options.smoke else forms:
        if outer is None:
            mesh, plan = sk.make_mesh(pod=WORKERS), sk.dp("pod")
            init, step = sk.make_train_step(grad_fn, optax.adamw(3e-3), mesh=mesh, plan=plan)
            state = init(params, key)
            sent = steps * sk.census(step, state, train[0]).sent(axis="pod")
            for batch in train:
                state, _ = step(state, batch)
            name, final, rounds = "dp", state.params, steps
        else:
            run = sk.diloco(worker, outer, mesh=sk.make_mesh(pod=WORKERS, data=1), axis="pod")
            ours = run.init(params, key)
            rounds = steps // every
            sent = rounds * sk.census(run.trace(ours)).sent(axis="pod")
            for number, batch in enumerate(train):
                ours, _ = run.step(ours, [each_worker(batch, k) for k in range(WORKERS)])
                if (number + 1) % every == 0:
                    ours = run.exchange(ours)
            name, final = f"DiLoCo, H={every}, {by}", ours.params
        theory = rounds * 2 * size * (WORKERS - 1) / WORKERS
        lines.append((name, f"{on_unseen(final):.3f}", str(rounds), f"{float(sent) / 1e6:.2f}", f"{theory / 1e6:.2f}"))
        records.append({"form": name, "loss": on_unseen(final), "exchanges": rounds, "sent": float(sent)})
        print(*lines[-1], flush=True)
    print(table(lines))
    if options.json:
        options.json.write_text("\n".join(map(json.dumps, records)) + "\n")


if __name__ == "__main__":
    main()
