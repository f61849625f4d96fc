"""One process of a run that keeps snapshots, as on a host of its own; what it saw goes to a file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardkit as sk
from shardkit import runtime
from support.checkpoint_child import digests

PLANS = {
    "fsdp": lambda: sk.fsdp("data", min_size=1, uneven="pad"),
    "dp": lambda: sk.dp("data"),
}


def main(
    memory: str, reports: str, hosts: list[str], steps: int, plan: str = "fsdp", *, dies: tuple[int, int] = (-1, -1)
) -> None:
    """Resumes or begins, keeps every second step, and reports what it began with and what it kept."""
    os.environ["SHARDKIT_HOST"] = hosts[int(os.environ["RANK"])]
    runtime.initialize()
    rank = jax.process_index()
    mesh, plans = sk.make_mesh(data=-1), PLANS[plan]()
    grad_fn = sk.value_and_grad(lambda p, batch, keys: sk.Mean.of((batch @ p["w"] - p["b"].sum()) ** 2))
    init, step = sk.make_train_step(grad_fn, optax.adam(0.1), mesh=mesh, plan=plans)
    params = {"w": jnp.arange(12.0 * 3).reshape(12, 3), "b": jnp.arange(7.0)}
    seen: dict[str, Any] = {"resumed": None, "kept": {}}
    with runtime.Snapshots(every=2, directory=memory) as snapshots:
        if snapshots.latest_step() is None:
            state, first = init(params, jax.random.key(0)), 0
        else:
            state, run = snapshots.restore(init.abstract(params))
            first = seen["resumed"] = run.position
        seen["began"] = digests(state)
        for index in range(first, steps):
            rows = np.random.default_rng(index).normal(size=(24, 12)).astype(np.float32)
            state, _ = step(state, runtime.from_full(rows, mesh, plans.batch_spec(mesh)))
            snapshots.save(state, position=index + 1)
            if index % 2:
                seen["kept"][index + 1] = digests(state)
    Path(reports, f"{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
