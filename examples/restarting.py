"""A training job that goes on by itself after a fault, and that saves nothing that differs between replicas.

shardkit launch -n 4 --restarts 5 -- restarting.py FOLDER --steps 1000
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardkit as sk
from shardkit import runtime

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--save-every", type=int, default=5)
parser.add_argument("--deadline", type=float, default=10, help="seconds for a step, a batch or a save")
options = parser.parse_args()

options.folder.mkdir(parents=True, exist_ok=True)
runtime.initialize()
runtime.watch_preemption()  # for a job of one process
jax.config.update("jax_compilation_cache_dir", str(options.folder / "programs"))  # a restart compiles nothing
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
mesh = sk.make_mesh(data=2, fsdp=-1)
plan = sk.chain(sk.dp("data"), sk.fsdp("fsdp", min_size=1))
spec = plan.batch_spec(mesh)
rows = runtime.local_rows(32, mesh, spec)  # of each batch, those that this process makes


def init_params():
    # By NumPy, which compiles nothing.
    rng = np.random.default_rng(0)
    w = rng.normal(size=(8, 32)).astype(np.float32) / 3
    v = rng.normal(size=(32, 1)).astype(np.float32) / 6
    return {"w": w, "v": v}


def loss_fn(params, batch, keys):
    targets = jnp.tanh(batch @ jnp.linspace(-1, 1, 8))[:, None]
    outputs = jnp.tanh(batch @ params["w"]) @ params["v"]
    return sk.Mean.of((outputs - targets) ** 2)


def make_batches(first):
    for number in range(first, options.steps):
        batch = np.random.default_rng(number).normal(size=(32, 8)).astype(np.float32)
        # Without communication: in that, the guard would take the processes that wait for the one that is slow.
        yield number, runtime.from_process_local(batch[rows], mesh, spec)


def log_loss(file, step, loss):
    file.write(json.dumps({"step": step, "loss": loss}) + "\n")
    file.flush()  # a process that is killed writes nothing more


params = init_params()
init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.adam(0.003), mesh=mesh, plan=plan)
with runtime.Checkpoints(options.folder / "saved") as checkpoints, open(options.folder / "log.jsonl", "a") as log:
    if checkpoints.latest_step() is None:
        state = init(params, jax.random.key(0))
        first = 0
    else:
        # The newest checkpoint may be damaged by the fault: then from the one before it.
        state, saved = checkpoints.restore(init.abstract(params), damaged="older")
        first = saved.position
    deadlines = runtime.Deadlines(step=options.deadline, data=options.deadline, save=options.deadline)
    guard = runtime.guard(mesh=mesh, deadlines=deadlines, first_step=first)  # a restart counts steps as the first run
    step = guard.watch(step)
    for number, batch in guard.data(make_batches(first)):
        state, metrics = step(state, batch)
        loss = float(metrics["loss"])
        if runtime.is_main():
            log_loss(log, number + 1, loss)
        preempted = runtime.preempted(number)
        if preempted or (number + 1) % options.save_every == 0:
            # A checkpoint of replicas that differ would carry a silent fault into every restart.
            runtime.assert_no_drift(state)
            with guard.phase("save"):
                checkpoints.save(state, position=number + 1)
                checkpoints.wait()
        if preempted:
            runtime.finish(runtime.PREEMPTED)
