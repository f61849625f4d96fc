"""Where arrays lie: as the parameters' own metadata says."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk


@partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["names"])
@dataclass
class Box:
    """A parameter with the logical names of its dims beside it, as module libraries hold it."""

    value: jax.Array
    names: tuple[str, ...]


def is_box(x):
    return isinstance(x, Box)


def boxed(key):
    """Parameters as an initialiser with metadata returns them."""
    first, second = jax.random.split(key)
    return {
        "up": Box(jax.random.normal(first, (16, 32)), ("embed", "hidden")),
        "down": Box(jax.random.normal(second, (32, 16)), ("hidden", "embed")),
        "gain": Box(jnp.ones(16), ("embed",)),
    }


def unboxed(key):
    return jax.tree.map(lambda box: box.value, boxed(key), is_leaf=is_box)


# proves S26: the names that the initialiser attaches decide where parameters and optimizer state are made
@pytest.mark.parametrize("mapped", ["model", None])
def test_metadata_of_the_initialiser_is_kept(mapped, mesh2x4):
    names = jax.tree.map(lambda box: box.names, jax.eval_shape(boxed, jax.random.key(0)), is_leaf=is_box)
    specs = sk.specs_from_rules(names, {"embed": "data" if mapped is None else None, "hidden": "model"})

    def loss(params, batch, keys):
        hidden = sk.layers.column_linear(batch * params["gain"][None], params["up"], "model")
        return sk.Mean.of(sk.layers.row_linear(hidden, params["down"], "model") ** 2)

    if mapped is None:  # the same metadata under other rules, without a step: parameters alone
        params = jax.jit(unboxed, out_shardings=jax.tree.map(lambda s: jax.NamedSharding(mesh2x4, s), specs))(
            jax.random.key(0)
        )
        held = {"up": (8, 8), "down": (8, 8), "gain": (8,)}
    else:
        plan = sk.chain(sk.dp("data"), sk.tp("model", specs))
        init, _ = sk.make_train_step(sk.value_and_grad(loss), optax.adam(1e-3), mesh=mesh2x4, plan=plan)
        state = init(unboxed, jax.random.key(0))
        params, held = state.params, {"up": (16, 8), "down": (8, 16), "gain": (16,)}
        moments = jax.tree.map(lambda x: x.sharding.spec, state.opt_state[0].mu)
        assert moments == specs
    assert jax.tree.map(lambda x: x.sharding.spec, params) == specs
    assert {name: x.addressable_shards[0].data.shape for name, x in params.items()} == held
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), params, unboxed(jax.random.key(0)))
