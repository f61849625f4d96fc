"""Takes steps with a program from a file, in a process that compiles nothing: `FOLDER STEPS`."""

import json
import pickle
import sys
from pathlib import Path

import jax
import numpy as np

import shardkit as sk

sk.simulate_devices(8)
folder, steps = Path(sys.argv[1]), int(sys.argv[2])
mesh = sk.make_mesh(data=2, model=4)
state, specs, batch = pickle.loads((folder / "start.pickle").read_bytes())
key = jax.random.key(0)

compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: compiled.append(event) if event.startswith("/jax/core/compile/") else None
)
step = sk.aot.load(folder / "step.program")
state = jax.tree.map(lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec)), state, specs)
state = state._replace(key=key)
losses = []
for _ in range(steps):
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"]).hex())
params = {name: np.asarray(x).tobytes().hex() for name, x in state.params.items()}
print(json.dumps({"compiled": compiled, "losses": losses, "params": params}))
