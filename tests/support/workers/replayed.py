"""Replay in a job: a right step, then one with a fault of a device of process 1; the last line has what it says."""

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.runtime.replay import CorruptionError, Replay
from support.planted.corrupted import RIGHT, small

sk.runtime.initialize(timeout=30)
mesh = sk.make_mesh(data=2, model=2)
batch = sk.runtime.from_full(np.arange(8, dtype=np.float32).reshape(4, 2) / 4, mesh, P("data"))
bad = mesh.devices[1, 0]
said = {}
for name, device in {"right": RIGHT, "wrong": bad}.items():
    state = sk.runtime.from_full({"w": np.arange(8, dtype=np.float32).reshape(2, 4) / 8}, mesh, P(None, "model"))
    build = lambda mesh, device=device: small(mesh, device)  # noqa: E731
    step = Replay(build(mesh), build, mesh=mesh, every=1)
    said[name] = None
    try:
        for _ in range(2):
            state, _ = step(state, batch)
        step.check()
    except CorruptionError as error:
        said[name] = str(error).replace(f"device {bad.id} ", "device DEVICE ")
print(f"\nright {said['right']}; {said['wrong']}", flush=True)
jax.distributed.shutdown()
