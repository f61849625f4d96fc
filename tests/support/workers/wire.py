"""Sums of shares, and the check of the wire, in a job: `wire.py DIRECTORY` leaves there what each process saw."""

import importlib
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit._jax import gloo
from support.wires import planted

cluster = sk.runtime.initialize(timeout=300)
mesh = sk.make_mesh(d=2, m=2)
saw = {"mended": gloo.races(("cpu",)) and gloo.jaxlib_version < gloo._MENDED}


def collectives(lowered):
    return sorted(set(re.findall(r"stablehlo\.(reduce_scatter|all_to_all)", lowered.as_text())))


def whole(rows, spec):
    return jax.make_array_from_callback(rows.shape, jax.NamedSharding(mesh, spec), lambda index: rows[index])


def loss_fn(params, batch, keys):
    return sk.Mean.of(batch @ params["w"])


batch = whole(np.arange(64.0, dtype="float32").reshape(4, 16) * 4, P(("d", "m")))
for name, strategy in (("zero1", sk.zero1), ("fsdp", sk.fsdp)):
    plan = sk.chain(strategy("d", min_size=0), sk.dp("m"))
    init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(1.0), mesh=mesh, plan=plan)
    state = init({"w": jnp.zeros((16,))}, jax.random.key(0))
    rows = sk.census(step, state, batch).rows
    kinds = {row.kind for row in rows}
    text = collectives(step.lower(state, batch))
    state, _ = step(state, batch)
    shard = state.params["w"].addressable_shards[0]
    want = -np.asarray(np.arange(64.0).reshape(4, 16) * 4).mean(0)[shard.index]
    saw[name] = ["reduce_scatter" in kinds, text, bool((np.asarray(shard.data) == want).all())]


def raw(x, y):  # what a user writes: over both axes in either order, untiled, in bfloat16, and a transpose
    one = lax.psum_scatter(x, ("m", "d"), scatter_dimension=1, tiled=True)
    two = lax.psum_scatter(x[:, :2].T, "d")
    three = lax.psum_scatter(x.astype(jnp.bfloat16), "m", scatter_dimension=1, tiled=True)
    four = jax.grad(lambda y: (lax.all_gather(y, "d", tiled=True) * x[0, 0]).sum())(y)
    return one.reshape(1, -1), two.reshape(1, -1), three.astype(jnp.float32).reshape(1, -1), four.reshape(1, -1)


both = P(("d", "m"))
raw = jax.jit(jax.shard_map(raw, mesh=mesh, in_specs=both, out_specs=both))
values = np.random.default_rng(0).integers(-9, 9, (4, 1, 8)).astype("float32")
total = values.sum(0)
by_d, by_m = values.reshape(2, 2, 8).sum(0), values.reshape(2, 2, 8).sum(1)
expected = []
for device in range(4):
    d, m = divmod(device, 2)
    at = 2 * m + d
    expected.append([total[0, 2 * at : 2 * at + 2], by_d[m, d : d + 1], by_m[d, 4 * m : 4 * m + 4], by_d[m, :1]])
x, y = whole(values[:, 0], both), whole(np.ones(4, np.float32), both)
saw["raw"] = [collectives(raw.lower(x, y)), True]
for number, result in enumerate(raw(x, y)):
    for shard in result.addressable_shards:
        got, want = np.asarray(shard.data).reshape(-1), expected[shard.index[0].start][number]
        saw["raw"][1] &= bool((got == want).all())

wire = importlib.import_module("shardkit.testing.wire")
saw["right"] = str(sk.testing.wire(raw, x, y, seconds=0.05)).splitlines()[0]


def late(shares, x):  # on device 3 alone, which process 1 has
    return jnp.where(lax.axis_index(("d", "m")) == 3, shares[0], shares.sum(0))


mean = jax.jit(jax.shard_map(lambda x, y: x + lax.psum(y, "d"), mesh=mesh, in_specs=both, out_specs=both))
with planted("psum_invariant_p", late):
    try:
        sk.testing.wire(mean, y, y, seconds=0.05)
    except AssertionError as error:
        saw["verdict"] = str(error)
Path(sys.argv[1], f"{cluster.rank}.json").write_text(json.dumps(saw))
