"""From jax.pmap and jax.device_put_replicated to a mesh: the same numbers without a dim of devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardkit as sk
from shardkit.analysis import lint

N, ROWS = 4, 8
PARAMS = {"w": np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32), "b": np.zeros(3, np.float32)}
X, Y = (np.random.default_rng(i).normal(size=(N * ROWS, k)).astype(np.float32) for i, k in ((1, 6), (2, 3)))


def error(params, x, y):
    return (x @ params["w"] + params["b"][None] - y) ** 2


def before(params, x, y):
    """A step for pmap: one device's, on leaves with a leading dim of devices."""
    gradients = jax.grad(lambda p: jnp.mean(error(p, x, y)))(params)
    gradients = jax.lax.pmean(gradients, "batch")
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


# proves S62, T5: the docstring of replicate and the lint's remedy name what is new, which gives the same numbers
def test_a_step_of_pmap_and_what_takes_its_place():
    devices = jax.devices()[:N]
    assert not hasattr(jax, "device_put_replicated") and "device_put_replicated" in sk.runtime.replicate.__doc__
    mesh = sk.make_mesh(devices, data=N)
    whole = sk.runtime.replicate(PARAMS, mesh)
    assert {name: leaf.shape for name, leaf in whole.items()} == {"w": (6, 3), "b": (3,)}
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * N), PARAMS)  # what device_put_replicated gave
    for name, leaf in whole.items():
        assert [piece.device for piece in leaf.addressable_shards] == devices
        for i, piece in enumerate(leaf.addressable_shards):
            np.testing.assert_array_equal(piece.data, stacked[name][i])

    split = (X.reshape(N, ROWS, -1), Y.reshape(N, ROWS, -1))
    old = jax.pmap(before, "batch", devices=devices)
    remedies = {each.remedy for each in lint(old, stacked, *split) if each.rule == "pmap"}
    assert remedies == {"Write jax.shard_map over a mesh from make_mesh."}
    expected = jax.tree.map(lambda leaf: leaf[0], old(stacked, *split))

    def loss(params, batch, keys):
        return sk.Mean.of(error(params, batch["x"], batch["y"]))

    init, step = sk.make_train_step(sk.value_and_grad(loss), optax.sgd(0.1), mesh=mesh, plan=sk.dp("data"))
    state, _ = step(init(PARAMS, jax.random.key(0)), {"x": X, "y": Y})
    for name, leaf in state.params.items():
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-5, atol=1e-7)
