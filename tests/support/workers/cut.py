"""Trains until STEPS with a checkpoint every fourth step in FOLDER; its guard gives a silent machine four seconds."""

import json
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
mesh, plan = sk.make_mesh(data=-1), sk.fsdp("data")
init, step = sk.make_train_step(
    sk.value_and_grad(lambda params, batch, keys: sk.Mean.of((batch @ params["w"] - 1) ** 2)),
    optax.adam(0.1),
    mesh=mesh,
    plan=plan,
)
params = {"w": jnp.ones(12)}
with runtime.Checkpoints(folder / "saved") as checkpoints:
    state, first = init(params, jax.random.key(0)), 0
    if checkpoints.latest_step() is not None:
        state, saved = checkpoints.restore(init.abstract(params))
        first = saved.position
    guard = runtime.guard(mesh=mesh, deadlines=runtime.Deadlines(silence=4), first_step=first)
    step = guard.watch(step)
    for index in range(first, steps):
        rows = np.random.default_rng(index).normal(size=(12, 12)).astype(np.float32)
        state, metrics = step(state, runtime.from_full(rows, mesh, plan.batch_spec(mesh)))
        if runtime.is_main():
            with open(folder / "log.jsonl", "a") as log:
                row = {"step": index, "loss": float(metrics["loss"]), "devices": mesh.size}
                log.write(json.dumps(row) + "\n")
        if index % 4 == 3:
            with guard.phase("save"):
                checkpoints.save(state, position=index + 1)
                checkpoints.wait()
        time.sleep(0.2 if steps == 10**6 else 0.0)
