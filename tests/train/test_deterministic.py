"""`deterministic=G`: the same bits on every mesh, after every step, and after a restart on another one."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk
from shardkit.models import transformer
from shardkit.testing import LAWS
from support.conformance import MODELS, PLANS
from support.training import check, lenient

KEY = jax.random.key(3)
FSDP = {"min_size": 1, "uneven": "pad"}
MESHES = {
    "dp1": ({"data": 1}, sk.dp("data")),
    "dp2": ({"data": 2}, sk.dp("data")),
    "dp4": ({"data": 4}, sk.dp("data")),
    "dp8": ({"data": 8}, sk.dp("data")),
    "zero1": ({"data": 8}, sk.zero1("data", min_size=1)),
    "fsdp": ({"data": 8}, sk.fsdp("data", **FSDP)),
    "hsdp": ({"data": 2, "shard": 4}, sk.chain(sk.dp("data"), sk.fsdp("shard", min_size=1))),
    "hsdp, the other order": ({"shard": 4, "data": 2}, sk.chain(sk.dp("data"), sk.fsdp("shard", min_size=1))),
    "fsdp and zero1": ({"data": 2, "zero": 4}, sk.chain(sk.fsdp("data", **FSDP), sk.zero1("zero", min_size=1))),
    "dp3": ({"data": 3}, sk.dp("data")),
    "fsdp6": ({"data": 6}, sk.fsdp("data", **FSDP)),
    "hsdp6": ({"data": 2, "shard": 3}, sk.chain(sk.dp("data"), sk.fsdp("shard", **FSDP))),
}


def loss_fn(params, batch, keys):
    """Products before sums everywhere, dropout, weights, and leaves of every size."""
    h = sk.dropout(jnp.tanh(batch["x"] @ params["up"] + params["bias"][None]), keys, 0.1)
    y = h @ params["down"]
    y = y * params["gain"] + params["odd"][1] * y**2 + jnp.sum(jnp.tanh(batch["x"] * params["each"][None]), -1)[:, None]
    return sk.Mean.of(jnp.sum((y - batch["y"]) ** 2, -1), batch["weight"]), {"size": sk.Mean.of(jnp.abs(h))}


def make_params():
    up, down, bias = (jax.random.normal(key, (16, 24)) / 4 for key in jax.random.split(KEY, 3))
    gain, odd = jnp.float32(0.7), jnp.array([0.1, 0.2, 0.3])
    return {"up": up, "down": down.T[:, :8], "bias": bias[0, :24], "gain": gain, "odd": odd, "each": jnp.ones(16)}


def make_batch(seed, size=48):
    rng = np.random.default_rng(seed)
    x, y, weight = rng.normal(size=(size, 16)), rng.normal(size=(size, 8)), rng.integers(1, 5, size)
    return {"x": x.astype(np.float32), "y": y.astype(np.float32), "weight": weight.astype(np.float32)}


@functools.cache
def built(name, groups=8, optimizer=None, **options):
    sizes, plan = MESHES[name]
    mesh = sk.make_mesh(jax.devices()[: math.prod(sizes.values())], **sizes)
    optimizer = lenient(optimizer or optax.adamw(1e-2))
    return sk.make_train_step(
        sk.value_and_grad(loss_fn), optimizer, mesh=mesh, plan=plan, deterministic=groups, **options
    )


def bits(*trees):
    return {
        jax.tree_util.keystr(path): np.asarray(x).tobytes()
        for path, x in jax.tree_util.tree_leaves_with_path(sk.unpadded(trees))
    }


def trained(name, steps=3, **options):
    """The bits of the metrics of each step, and of what the last one leaves."""
    init, step = built(name, **options)
    state, found = init(make_params(), KEY), []
    for seed in range(steps):
        state, metrics = step(state, make_batch(seed))
        found.append(bits(metrics))
    return [*found, bits(state.params, state.opt_state)]


def compare(names, **options):
    first, *others = names
    wanted = trained(first, **options)
    for name in others:
        for i, (got, want) in enumerate(zip(trained(name, **options), wanted, strict=True)):
            assert [leaf for leaf in want if got[leaf] != want[leaf]] == [], (name, f"step {i}")


# proves F77 in part: no catalogue of operations
def test_the_bits_are_the_same_on_every_mesh_and_under_every_plan():
    compare(["dp1", "dp2", "dp8", "zero1", "fsdp"])
    # An ordinary step adds in another order on every mesh.
    assert trained("dp1", groups=None) != trained("dp8", groups=None)


# A device with 6 groups has two runs that are subtrees, one with 4 or 2 has one; the axes of the batch come in any order.
def test_any_number_of_groups_and_several_axes():
    compare(["dp2", "dp3", "hsdp6"], groups=12, steps=2)
    compare(["fsdp and zero1", "hsdp, the other order"], steps=2)


def test_a_restart_on_another_number_of_devices(tmp_path):
    init, step = built("zero1")
    state = init(make_params(), KEY)
    state, _ = step(state, make_batch(0))
    with sk.runtime.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
    state, metrics = step(state, make_batch(1))
    wanted = bits(metrics, state.params, state.opt_state)
    init, step = built("dp2")
    with sk.runtime.Checkpoints(tmp_path) as checkpoints:
        state, _ = checkpoints.restore(init(make_params(), KEY))
    state, metrics = step(state, make_batch(1))
    assert bits(metrics, state.params, state.opt_state) == wanted


# The rest of this file compiles quickly, without the fused multiply-adds that a user's compiler makes.
def test_the_bits_are_the_same_as_users_compile():
    options = {"xla_backend_optimization_level": 3, "xla_cpu_use_fusion_emitters": True}
    found = []
    for name in ("dp1", "dp2", "dp8"):
        init, step = built(name)
        state = init(make_params(), KEY)
        compiled = step.lower(state, make_batch(0)).compile(compiler_options=options)
        key, state = state.key, state._replace(key=None)
        for seed in range(5):
            state, metrics = compiled(state, key, jax.device_put(make_batch(seed), compiled.input_shardings[0][2]))
        found.append(bits(metrics, state.params, state.opt_state))
    assert found[0] == found[1] == found[2]
