"""Trains on all processes and saves every second step to FOLDER; after two restarts, or with STEPS, it ends."""

import json
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardkit as sk
from shardkit import runtime

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
runtime.initialize(timeout=60)
mesh, plan = sk.make_mesh(data=-1), sk.dp("data")
init, step = sk.make_train_step(
    sk.value_and_grad(lambda params, batch, keys: sk.Mean.of((batch @ params["w"] - 1) ** 2)),
    optax.adam(0.1),
    mesh=mesh,
    plan=plan,
)
params = {"w": jnp.ones(4)}
runtime.watch_preemption()
guard = runtime.guard(mesh=mesh)
restarts = int(os.environ.get("SHARDKIT_RESTARTS", 0))
with runtime.Checkpoints(folder / "saved") as checkpoints:
    first = 0
    if checkpoints.latest_step() is None:
        state = init(params, jax.random.key(0))
    else:
        state, saved = checkpoints.restore(init.abstract(params))
        first = saved.position
    step = guard.watch(step)
    last = steps or (first + 6 if restarts > 1 else 10**6)
    for index in range(first, last):
        rows = np.random.default_rng(index).normal(size=(12, 4)).astype(np.float32)
        state, metrics = step(state, runtime.from_full(rows, mesh, plan.batch_spec(mesh)))
        if runtime.is_main():
            row = {"step": index, "loss": float(metrics["loss"]), "devices": mesh.size, "restarts": restarts}
            with open(folder / "log.jsonl", "a") as log:
                log.write(json.dumps(row) + "\n")
        with guard.phase("save"):
            leaves = runtime.preempted(index)
            if leaves or index % 2:
                checkpoints.save(state, position=index + 1)
                checkpoints.wait()
        if leaves:
            runtime.finish(runtime.PREEMPTED)
        time.sleep(0.0 if steps else 0.2)
