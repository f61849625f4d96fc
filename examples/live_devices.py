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

BATCH = 12
EVERY = 4  # steps between two copies of the state on the host
STEPS = 16
X = np.random.default_rng(0).normal(size=(STEPS, BATCH, 3)).astype(np.float32)


def loss_fn(params, batch, keys):
    return sk.Mean.of((batch @ params["w"] - batch.sum(-1)) ** 2)


def train(devices, first, saved, count):
    """The state after `count` steps on these devices, copied to the host, and the losses of the steps."""
    mesh = sk.make_mesh(devices, data=len(devices))
    init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(0.1), mesh=mesh, plan=sk.dp("data"))
    if saved is None:
        state = init({"w": np.zeros(3, np.float32)}, jax.random.key(0))
    else:
        state = sk.runtime.from_full(saved, mesh)
    # The rows of a batch that this process feeds; there are more of them once a process has ended.
    rows = sk.runtime.local_rows(BATCH, mesh, P("data"))
    losses = []
    for x in X[first : first + count]:
        batch = sk.runtime.from_process_local(x[rows], mesh, P("data"), batch=BATCH)
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    # The arrays on the devices of a process that ends are lost; a copy on the host is not.
    return sk.runtime.fetch(state), losses


if __name__ == "__main__":
    jax.config.update("jax_enable_recoverability", True)
    processes = int(os.environ["JAX_NUM_PROCESSES"])
    process = int(os.environ["JAX_PROCESS_ID"])
    jax.distributed.initialize(None, processes, process, heartbeat_timeout_seconds=4)
    saved = None
    losses: list[float] = []
    while len(losses) < STEPS:
        step = len(losses)
        if process == processes - 1 and step == 8:
            os._exit(1)  # what a real job does not plan
        try:
            # All processes that are left get the same devices here, and fail together if one ends inside.
            with live_devices(jax.devices()) as devices:
                state, new_losses = train(devices, step, saved, EVERY)
        except Exception as error:
            # A process ended during these steps: they are taken again without it, from the copy before them.
            sk.runtime.log(f"again from step {step}: {type(error).__name__}")
            continue
        saved = state
        losses += new_losses
        sk.runtime.log(f"step {len(losses)} on {len(devices)} devices: loss {losses[-1]:.4f}")
    if process > 0:
        os._exit(0)
    time.sleep(1)  # process 0 ends last, and with it jax's coordination service, whose end aborts the others
