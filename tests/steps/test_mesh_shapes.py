"""One step on every shape of eight devices: mesh, init, batch, compile, gradients and update as on one device."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from support.counting import Compiles

DIM, HIDDEN, CLASSES, BATCH = 8, 16, 8, 16
NAMES = {"up": ("embed", "hidden"), "down": ("hidden", "embed"), "head": ("embed", "classes")}
SPECS = sk.specs_from_rules(NAMES, {"embed": None, "hidden": "model", "classes": "model"})


def params(key):
    shapes = {"up": (DIM, HIDDEN), "down": (HIDDEN, DIM), "head": (DIM, CLASSES)}
    keys = jax.random.split(key, len(shapes))
    return {name: jax.random.normal(k, s) / 4 for k, (name, s) in zip(keys, shapes.items(), strict=True)}


def batch(seed):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(BATCH, DIM)).astype(np.float32), "label": rng.integers(0, CLASSES, BATCH)}


def loss_fn(axis):
    """A block split inside and integer-label cross-entropy, on the mesh or, without an axis, on one device."""

    def loss(params, batch, keys):
        hidden = jax.nn.gelu(sk.layers.column_linear(batch["x"], params["up"], axis))
        y = batch["x"] + sk.layers.row_linear(hidden, params["down"], axis)
        logits = sk.layers.column_linear(y, params["head"], axis)
        if axis is not None:
            logits = sk.all_gather(logits, axis, dim=-1, replicated=True)
        return sk.Mean.of(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]))

    return loss


# proves S28, S75, S93, S95: what each of the six parts leaves, with labels split as their inputs are
@pytest.mark.parametrize(("data", "model"), [(4, 2), (2, 4), (1, 8), (8, 1)])
def test_the_six_parts_of_a_loop_on_every_shape_of_eight_devices(data, model):
    mesh, specs = sk.make_mesh(data=data, model=model), SPECS if model > 1 else dict.fromkeys(SPECS, P())
    plan = sk.chain(sk.dp("data"), sk.tp("model", SPECS))
    init, step = sk.make_train_step(sk.value_and_grad(loss_fn("model")), optax.sgd(0.5), mesh=mesh, plan=plan)

    state = init(params, jax.random.key(0))
    start = jax.tree.map(np.asarray, state.params)
    assert jax.tree.map(lambda x: x.sharding.spec, state.params) == specs
    placed = sk.shard(batch(0), mesh, {"x": P("data", None), "label": P("data")})
    assert placed["label"].dtype == np.int32 and placed["label"].addressable_shards[0].data.shape == (BATCH // data,)

    with jax.numpy_dtype_promotion("standard"), Compiles() as first:
        state, metrics = step(state, placed)
    assert first.count == 1
    assert jax.tree.map(lambda x: x.sharding.spec, state.params) == specs

    value, gradients = jax.jit(jax.value_and_grad(lambda p: loss_fn(None)(p, batch(0), None).total / BATCH))(start)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(state.params[name], start[name] - 0.5 * gradient, rtol=1e-4, atol=1e-6)
