"""Saves under the guard; the write of one process does not end: `saver.py DIRECTORY --rank 1 --held write`."""

import argparse
import os
import threading
import time

parser = argparse.ArgumentParser()
parser.add_argument("directory")
parser.add_argument("--rank", type=int)
parser.add_argument("--held", choices=["write", "end"], help="what does not end: a process's own part, or what follows")
parser.add_argument("--deadline", type=float, default=3.0)
given = parser.parse_args()

import jax
import jax.numpy as jnp
import optax
from orbax.checkpoint._src.handlers.base_pytree_checkpoint_handler import BasePyTreeCheckpointHandler as Handler

import shardkit as sk

cluster = sk.runtime.initialize(timeout=300)
mesh = sk.make_mesh(data=jax.device_count())
guard = sk.runtime.guard(mesh=mesh, deadlines=sk.runtime.Deadlines(compile=60, step=60, save=given.deadline))
init, step = sk.make_train_step(
    sk.value_and_grad(lambda params, batch, keys: jnp.mean((batch["x"] @ params["w"]) ** 2)),
    optax.sgd(0.1),
    mesh=mesh,
    plan=sk.fsdp("data", min_size=1),
)
state = init(lambda key: {"w": jnp.ones((8, 3))}, jax.random.key(0))
step = guard.watch(step)
batch = {"x": jnp.ones((8, 8))}


class Held:
    """A write that does not end; the others do."""

    def result(self, timeout=None):
        print(f"planted at {time.monotonic():.3f}", flush=True)
        threading.Event().wait()


async def held(self, *args, write=Handler.async_save, **kwargs):
    return [*await write(self, *args, **kwargs), Held()]


async def never_ends(self, *args, **kwargs):
    Held().result()


if int(os.environ["JAX_PROCESS_ID"]) == given.rank:
    name, instead = {"write": ("async_save", held), "end": ("_finalize_async", never_ends)}[given.held]
    setattr(Handler, name, instead)
with sk.runtime.Checkpoints(given.directory) as checkpoints:
    for _ in range(3):
        state, metrics = step(state, batch)
        with guard.phase("save"):
            checkpoints.save(state)
    with guard.phase("save"):
        checkpoints.wait()
print("finished", flush=True)
