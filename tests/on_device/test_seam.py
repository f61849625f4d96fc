"""Resharding parameters in and gradients out: what one large leaf may cost."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.on_device import seam
from shardkit.on_device.cuts import scatter_cuts
from shardkit.plans.splits import Cut

STACK = {"layers": jnp.asarray(np.random.default_rng(0).normal(size=(3, 8, 4)), jnp.float32)}


def loss(params, batch, keys):
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w) @ w.T, None), batch, params["layers"])
    return sk.Mean.of(x.astype(jnp.float32) ** 2)


def one_step(plan, precision, sizes):
    mesh = sk.make_mesh(jax.devices()[:4], **sizes)
    init, step = sk.make_train_step(sk.value_and_grad(loss), optax.sgd(0.1), mesh=mesh, plan=plan, precision=precision)
    state, batch = init(STACK, jax.random.key(0)), np.linspace(-1, 1, 64, dtype="f").reshape(8, 8)
    with jax.numpy_dtype_promotion("standard"):
        census = sk.census(step, state, batch)
        return step(state, batch)[0].params["layers"], census


@pytest.mark.quick("sizes1-plan0", "sizes0-plan1")
@pytest.mark.parametrize("plan", [sk.zero1("d", min_size=1), sk.fsdp("d", min_size=1)])
@pytest.mark.parametrize("sizes", [{"d": 4}, {"d": 2, "r": 2}])
def test_a_stack_is_scattered_layer_by_layer_where_the_sum_is_wider(monkeypatch, plan, sizes):  # proves F17, F19, F23
    plan = sk.chain(plan, sk.dp("r")) if "r" in sizes else plan
    whole, before = one_step(plan, "bf16", sizes)
    monkeypatch.setattr(seam, "LAYER_BYTES", 0)
    layered, census = one_step(plan, "bf16", sizes)
    np.testing.assert_array_equal(layered, whole)
    assert census.sent() == before.sent()
    (row,) = [row for row in census.rows if row.kind == "reduce_scatter"]
    assert row.count == 3 and row.bytes_in == 8 * 4 * 4
    # in float32 there is nothing to save
    (row,) = [row for row in one_step(plan, None, sizes)[1].rows if row.kind == "reduce_scatter"]
    assert row.count == 1


@pytest.mark.parametrize("varies", [(), ("a",), ("b",), ("a", "b")])
def test_a_gradient_is_summed_where_it_varies_and_cut_where_it_is_complete(varies):  # proves F17
    grads = np.random.default_rng(1).integers(-9, 9, (2, 2, 3, 7)).astype("f")  # of each device; 7 is padded to 8
    grads[:] = grads[: 2 if "a" in varies else 1, : 2 if "b" in varies else 1]

    def kernel(grads):
        mine = grads[tuple(sk.axis_index(axis) if axis in varies else 0 for axis in ("a", "b"))]
        return jax.lax.map(lambda layer: scatter_cuts(layer, (Cut(-1, ("a", "b")),), jnp.float32), mine)

    mesh = sk.make_mesh(jax.devices()[:4], a=2, b=2)
    found = jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=P(), out_specs=P(None, ("a", "b"))))(grads)
    summed = tuple(dim for dim, axis in enumerate(("a", "b")) if axis in varies)
    expected = grads.sum(summed, keepdims=True)[0, 0]
    np.testing.assert_array_equal(found, np.pad(expected, [(0, 0), (0, 1)]))
