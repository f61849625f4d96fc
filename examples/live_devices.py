"""Training that goes on when a process of the job ends, on the devices of those that are left.

Start it in each process, with jax's variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. To show
what happens, the last process ends itself after eight steps. `runtime.initialize` would end the whole job then, to be
started again from its checkpoint; here jax joins the processes, and its `live_devices` says which devices there are.
With zero or fsdp, go back to a checkpoint: only dp has all of the state on every process."""

import os
import time

import jax
import numpy as np
import optax
from jax.experimental.multihost_utils import live_devices
from jax.sharding import PartitionSpec as P

import shardkit as sk

BATCH, EVERY, STEPS = 12, 4, 16
X = np.random.default_rng(0).normal(size=(STEPS, BATCH, 3)).astype(np.float32)


def loss_fn(params, batch, keys):
    return sk.Mean.of((batch @ params["w"] - batch.sum(-1)) ** 2)


def on(devices):
    """The mesh, and init and step on it."""
    mesh = sk.make_mesh(devices, data=len(devices))
    return mesh, sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(0.1), mesh=mesh, plan=sk.dp("data"))


def train(devices, begin, saved, count):
    """The state after some steps on these devices, on the host, and their losses."""
    mesh, (init, step) = on(devices)
    state = (
        init({"w": np.zeros(3, np.float32)}, jax.random.key(0)) if saved is None else sk.runtime.from_full(saved, mesh)
    )
    rows, losses = sk.runtime.local_rows(BATCH, mesh, P("data")), []
    for x in X[begin : begin + count]:
        state, metrics = step(state, sk.runtime.from_process_local(x[rows], mesh, P("data"), batch=BATCH))
        losses.append(float(metrics["loss"]))
    return sk.runtime.fetch(state), losses


if __name__ == "__main__":
    jax.config.update("jax_enable_recoverability", True)
    size, rank = (int(os.environ[f"JAX_{name}"]) for name in ("NUM_PROCESSES", "PROCESS_ID"))
    jax.distributed.initialize(None, size, rank, heartbeat_timeout_seconds=4)
    saved = None
    losses: list[float] = []
    while len(losses) < STEPS:
        if rank == size - 1 and len(losses) == 8:
            os._exit(1)
        try:
            with live_devices(jax.devices()) as devices:  # the same ones on all of their processes
                after, more = train(devices, len(losses), saved, EVERY)
        except Exception as error:  # a process ended: its steps are taken again without it
            sk.runtime.log(f"again from step {len(losses)}: {type(error).__name__}")
            continue
        saved, losses = after, losses + more
        sk.runtime.log(f"step {len(losses)} on {len(devices)} devices: loss {losses[-1]:.4f}")
    if rank > 0:
        os._exit(0)
    time.sleep(1)  # process 0 ends last, and with it jax's coordination service, whose end aborts the others
