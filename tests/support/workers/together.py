"""What only several processes can show: `together.py DIRECTORY LATE` leaves there what each one saw, and when."""

import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.runtime.data import arrays, reading

cluster = sk.runtime.initialize(timeout=300)
rank, devices = cluster.rank, jax.devices()
saw = {"cluster": list(cluster), "devices": [cluster.device_count, cluster.local_device_count]}


def refusal(fn, *args, **options):
    try:
        fn(*args, **options)
    except RuntimeError as error:
        return str(error)
    return "nothing"


# From here on the last one is late by what it sleeps, and by nothing else.
sk.runtime.barrier("begun", 30)
if rank == cluster.processes - 1:
    time.sleep(float(sys.argv[2]))
saw["came"] = time.monotonic()
sk.runtime.barrier("all here", 30)
saw["went on"] = time.monotonic()
if rank == 0:
    saw["alone"] = refusal(sk.runtime.barrier, "nobody else", 0.2)

mesh = sk.make_mesh(devices, data=len(devices))
whole = np.arange(8, dtype=np.float32)
x = arrays.from_full(whole, mesh, P("data"))
if rank == 0:  # as everybody writes it first
    saw["print alone"] = refusal(reading.print_global, x, timeout=0.2)
sk.runtime.barrier("after the refusals", 30)
sk.runtime.log("only once")

some = sk.make_mesh(jax.devices()[: len(devices) // cluster.processes], a=-1)  # the devices of process 0
outside = arrays.from_full(whole, some, P("a"))
total = jax.jit(jax.shard_map(lambda x: sk.all_reduce(x, "a"), mesh=some, in_specs=P("a"), out_specs=P()))
saw["held"] = [np.asarray(piece).tolist() for piece in reading.local_shards(outside).values()]
result = total(outside)  # every process calls it
saw["result"] = [list(result.shape), [np.asarray(piece).tolist() for piece in reading.local_shards(result).values()]]
saw["then"] = float(jax.jit(jnp.sum, out_shardings=jax.NamedSharding(mesh, P()))(x))  # all of them go on together

# Workers of DiLoCo, each of one process, then each of a device of both: a step takes w to its target, and an exchange
# to the mean of the two.
grad_fn = sk.value_and_grad(lambda w, batch, keys: jnp.mean((batch - w) ** 2))
for name, grid in (("diloco", np.reshape(devices, (2, -1))), ("crossed", np.reshape(devices, (2, -1)).T)):
    run = sk.diloco(
        lambda mesh: sk.make_train_step(grad_fn, optax.sgd(0.5), mesh=mesh, plan=sk.dp("data")),
        optax.sgd(1.0),
        mesh=jax.sharding.Mesh(grid, ("pod", "data")),
        axis="pod",
    )
    own = [
        each
        and jax.make_array_from_callback(
            (2,), jax.NamedSharding(each.step.mesh, P("data")), lambda _, k=k: np.full(1, 4.0 * k, "f")
        )
        for k, each in enumerate(run.train_steps)
    ]
    state, metrics = run.step(run.init(jnp.zeros(()), jax.random.key(0)), own)
    found = reading.local_shards(run.exchange(state).params)
    saw[name] = [sorted(map(float, found.values())), [bool(each) for each in metrics]]

Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(saw))
