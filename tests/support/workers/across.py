"""A trainer and a rollout on meshes that share no device: `across.py DIRECTORY` leaves there what each process saw."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.resharding import between_meshes

cluster = sk.runtime.initialize(timeout=300)
devices = jax.devices()
draws = np.random.default_rng(0)
WHOLE = {
    "w": draws.normal(size=(8, 12)).astype(np.float32),
    "stack": draws.normal(size=(3, 4, 8)).astype(np.float32),
    "count": np.arange(8, dtype=np.int32),
    "flags": draws.integers(0, 2, (4, 4)).astype(bool),
    "empty": np.ones((0, 4), np.float32),
    "scale": np.float32(1.7),
    "keys": np.asarray(jax.random.key_data(jax.random.split(jax.random.key(1), 4))),
}
SOURCE = {
    "w": P("fsdp", "tp"),
    "stack": P(None, "tp", "fsdp"),
    "count": P("fsdp"),
    "flags": P(),
    "empty": P(None, "tp"),
    "scale": P(),
    "keys": P("fsdp"),
}
TARGET = {
    "w": P(None, "tp"),
    "stack": P(None, None, "tp"),
    "count": P(),
    "flags": P("tp"),
    "empty": P(),
    "scale": P(),
    "keys": P("tp"),
}


def on_mesh(mesh, specs):
    """The tree on a mesh; in a process without a device of it, its shapes."""
    whole = WHOLE | {"keys": jax.random.wrap_key_data(WHOLE["keys"])}
    tree = {name: sk.runtime.from_full(x, mesh, specs[name]) for name, x in whole.items()}
    if not any(device.process_index == jax.process_index() for device in mesh.devices.flat):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    return tree


def is_right(moved, mesh, dtype):
    """Whether every shard of this process has its bits, and is where it should be."""
    wrong = []
    for name, x in moved.items():
        want = WHOLE[name]
        if want.dtype == np.float32:
            want = np.asarray(jnp.asarray(want).astype(dtype))
        if not x.sharding.is_equivalent_to(NamedSharding(mesh, TARGET[name]), x.ndim):
            wrong.append(f"{name} is at {x.sharding}")
        for shard in x.addressable_shards:
            got = shard.data
            if name == "keys":
                got = jax.random.key_data(got)
            if np.asarray(got).dtype != want.dtype or not np.array_equal(np.asarray(got), want[shard.index]):
                wrong.append(f"{name} on device {shard.device.id}")
    return wrong


saw = {}
apart, both = (devices[:4], devices[4:]), (devices[0:2] + devices[4:6], devices[2:4] + devices[6:8])
CASES = [  # the devices of each mesh, the sizes of the rollout, the dtype there, the staging
    ("a process each", apart, {"tp": 4}, jnp.bfloat16, 2**24),
    ("a process each", apart, {"replica": 2, "tp": 2}, jnp.float32, 48),
    ("both in both", both, {"tp": 4}, jnp.float32, 48),
    ("both in both", both, {"replica": 2, "tp": 2}, jnp.bfloat16, 2**24),
]
for name, (own, others), sizes, dtype, piece_bytes in CASES:
    trainer, rollout = sk.make_mesh(own, fsdp=2, tp=2), sk.make_mesh(others, **sizes)
    params = on_mesh(trainer, SOURCE)
    options = {"mesh": trainer, "to": rollout, "dtype": dtype, "piece_bytes": piece_bytes}
    plan = sk.reshard_steps(params, SOURCE, TARGET, **options)
    moved = sk.reshard(params, SOURCE, TARGET, **options)
    arrival = plan.arrived(params, moved)
    again = sk.reshard(params, SOURCE, TARGET, check=True, donate=True, **options)
    saw[f"{name}, {' '.join(sizes)}, {jnp.dtype(dtype).name}"] = {
        "wrong": is_right(moved, rollout, dtype) + is_right(again, rollout, dtype),
        "bytes": [plan.crossing, plan.least],
        "arrival": str(arrival),
    }


def lose_one(x, names, pairs):
    """The ppermute without its second message."""
    return permute(x, names, [pairs[0], *pairs[2:]])


permute = between_meshes.permute
between_meshes.permute = lose_one
between_meshes._make_send.cache_clear()
params = on_mesh(trainer, SOURCE)
some = ["w", "flags"]
try:
    sk.reshard(
        {name: params[name] for name in some},
        {name: SOURCE[name] for name in some},
        {name: TARGET[name] for name in some},
        mesh=trainer,
        to=rollout,
        check=True,
    )
except RuntimeError as error:
    saw["lost"] = str(error)
Path(sys.argv[1], f"{cluster.rank}.json").write_text(json.dumps(saw))
