"""Trains with a snapshot every second step, and checkpoints in FOLDER; ends after two restarts, or after STEPS."""

import contextlib
import json
import os
import socket
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
runtime.watch_preemption()
guard = runtime.guard(mesh=mesh)
restarts = int(os.environ.get("SHARDKIT_RESTARTS", 0))
memory = folder / f"memory of {socket.gethostname()}"
memory.mkdir(mode=0o700, exist_ok=True)
with contextlib.ExitStack() as stack:
    checkpoints = stack.enter_context(runtime.Checkpoints(folder / "saved"))
    first, found, snapshots = 0, None, None
    if not steps:
        snapshots = stack.enter_context(runtime.Snapshots(every=2, directory=memory))
        found = runtime.restore_newest(init.abstract(params), snapshots, checkpoints)
    if found is None:
        state = init(params, jax.random.key(0))
    else:
        state, first = found[0], found[1].position
    step = guard.watch(step)
    last = steps or (first + 6 if restarts > 1 else 10**6)
    for index in range(first, last):
        rows = np.random.default_rng(index).normal(size=(12, 12)).astype(np.float32)
        state, metrics = step(state, runtime.from_full(rows, mesh, plan.batch_spec(mesh)))
        if runtime.is_main():
            row = {"step": index, "loss": float(metrics["loss"]), "devices": mesh.size, "restarts": restarts}
            with open(folder / "log.jsonl", "a") as log:
                log.write(json.dumps(row) + "\n")
        with guard.phase("save"):
            leaves = runtime.preempted(index)
            if snapshots is not None:
                snapshots.save(state, position=index + 1)
            if leaves or index % 100 == 99:
                checkpoints.save(state, position=index + 1)
                checkpoints.wait()
        if leaves:
            runtime.finish(runtime.PREEMPTED)
        time.sleep(0.0 if steps else 0.2)
