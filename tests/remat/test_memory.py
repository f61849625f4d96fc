"""Recomputing a layer: the memory of the compiled step, and its numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk

LAYERS, WIDTH, HIDDEN, ROWS = 8, 16, 256, 64


# proves S90
@pytest.mark.optimized
def test_recomputing_layers_takes_less_memory_and_changes_no_number(data8):
    def layer(w, x):
        return x + jnp.tanh(jnp.tanh(x @ w["up"]) @ w["down"])

    def params(key):
        up, down = jax.random.split(key)
        return {
            "up": jax.random.normal(up, (LAYERS, WIDTH, HIDDEN)) / 4,
            "down": jax.random.normal(down, (LAYERS, HIDDEN, WIDTH)) / 16,
        }

    x = np.random.default_rng(0).normal(size=(8 * ROWS, WIDTH)).astype(np.float32)
    temp, states = {}, {}
    for remat in (None, "full"):

        def loss(params, batch, keys, remat=remat):
            return sk.Mean.of(sk.scan_layers(layer, params, batch, remat=remat) ** 2)

        init, step = sk.make_train_step(sk.value_and_grad(loss), optax.sgd(0.1), mesh=data8, plan=sk.dp("data"))
        state = init(params, jax.random.key(0))
        temp[remat] = step.lower(state, x).compile().memory_analysis().temp_size_in_bytes
        states[remat] = step(state, x)[0].params
    kept = LAYERS * ROWS * HIDDEN * 4  # of each layer at least what one matmul made
    assert temp["full"] < temp[None] - kept
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), states["full"], states[None])
