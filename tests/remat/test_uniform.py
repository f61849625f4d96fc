"""Whether an update treats all layers alike: what is proved, and what is not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardkit.steps.layer_order import order_matters
from support.optimizers import OPTIMIZERS

L = 4
PARAMS = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in (("w", (L, 3, 2)), ("b", (L, 2)))}
PARAMS |= {"v": jax.ShapeDtypeStruct((2, 5), jnp.float32)}
STACKED = {"w": True, "b": True, "v": False}


def matters(optimizer):
    optimizer = optax.with_extra_args_support(optimizer)
    state = jax.eval_shape(optimizer.init, PARAMS)
    held = jax.tree.map(lambda x: x.shape in ((L, 3, 2), (L, 2)), state)
    update = lambda g, s, p, value: optimizer.update(g, s, p, value=value)  # noqa: E731
    args = PARAMS, state, PARAMS, jax.ShapeDtypeStruct((), jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        return order_matters(update, args, (STACKED, held, STACKED, False), (STACKED, held))


def stateless(change):
    """A transformation that changes the stack of weights."""

    def update(updates, state, params=None):
        return {**updates, "w": change(updates["w"])}, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


ALIKE = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adamw clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3)),
    "lion": optax.lion(1e-3),
    "a schedule": optax.adam(optax.warmup_cosine_decay_schedule(0, 1, 2, 9)),
    "skips": optax.apply_if_finite(optax.adam(1e-3), 3),
    "one norm for each layer": stateless(lambda g: g / jnp.linalg.norm(g, axis=(1, 2), keepdims=True)),
    "the sum of all layers": stateless(lambda g: g - jnp.sum(g, axis=0, keepdims=True)),
    "a product for each layer": stateless(lambda g: jnp.einsum("lij,lkj->lik", g, g) @ g),
    "transposed and back": stateless(lambda g: (g.transpose(2, 0, 1) * 2).transpose(1, 2, 0)),
    "all of a layer as one vector": stateless(lambda g: (g.reshape(L, -1) * 2).reshape(g.shape)),
    "an array of one dim": stateless(lambda g: g * jnp.arange(2.0)[None, None]),
    "a loop of five turns": stateless(lambda g: jax.lax.fori_loop(0, 5, lambda _, x: x * x, g)),
    "a loop over rows": stateless(
        lambda g: jax.lax.scan(lambda c, x: (c + x, c), jnp.zeros_like(jnp.sum(g, axis=1)), g.swapaxes(0, 1))[
            1
        ].swapaxes(0, 1)
    ),
}
POSITIONS = {
    "the first layers frozen": stateless(lambda g: g.at[:2].set(0)),
    "another rate for each layer": stateless(lambda g: g * (0.9 ** jnp.arange(L))[:, None, None]),
    "a table of rates": stateless(lambda g: g * np.array([1.0, 0.5, 0.2, 0.1])[:, None, None]),
    "one layer's norm": stateless(lambda g: g / jnp.linalg.norm(g[0])),
    "the layer before": stateless(lambda g: g + jnp.roll(g, 1, axis=0)),
    "a running sum": stateless(lambda g: jnp.cumsum(g, axis=0)),
    "the largest layer": stateless(lambda g: g * jnp.argmax(jnp.sum(g, axis=(1, 2)))),
    "sorted": stateless(lambda g: jnp.sort(g, axis=0)),
    "turned round": stateless(lambda g: g[::-1]),
    "layers beside rows": stateless(lambda g: (g.reshape(L * 3, 2) * jnp.arange(12.0)[:, None]).reshape(g.shape)),
    "random numbers": stateless(lambda g: g + jax.random.normal(jax.random.key(0), g.shape)),
    "a matrix over the layers": stateless(lambda g: jnp.einsum("ml,lij->mij", jnp.tri(L), g)),
    "a loop over the layers": stateless(lambda g: jax.lax.scan(lambda c, x: (c + x, c), g[0] * 0, g)[1]),
    "a weighted sum of the layers": stateless(lambda g: g * jnp.einsum("l,lij->", jnp.arange(1.0, L + 1), g)),
    "a running mean of the layers": stateless(
        lambda g: g * jax.lax.scan(lambda c, x: (0.5 * c + jnp.sum(x), None), jnp.float32(0), g)[0]
    ),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "a loop that mixes in a table": stateless(
        lambda g: jax.lax.fori_loop(0, 2, lambda _, x: x * jnp.arange(4.0)[:, None, None], g)
    ),
    "noise": optax.chain(optax.sgd(0.1), optax.add_noise(0.1, 0.5, 0)),
}


@pytest.mark.check
@pytest.mark.parametrize("name", ALIKE)
def test_an_update_that_treats_all_layers_alike_is_proved(name):
    assert not matters(ALIKE[name])


@pytest.mark.check
@pytest.mark.parametrize("name", POSITIONS)
def test_what_reads_a_position_is_not(name):
    assert matters(POSITIONS[name])


def permuted(tree, order, held):
    return jax.tree.map(lambda x, rows: x[order] if rows else x, tree, held)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_what_is_proved_is_true(name):
    """Of every optimizer that optax has: where the proof holds, the layers may stand in any order."""
    optimizer = optax.with_extra_args_support(OPTIMIZERS[name]())
    if matters(optimizer):
        return
    order, rng = np.array([2, 0, 3, 1]), np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), PARAMS)
    grads = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), PARAMS)

    def run(params, grads):
        with jax.numpy_dtype_promotion("standard"):
            return jax.jit(optimizer.update)(grads, optimizer.init(params), params, value=jnp.float32(1))[0]

    there = run(permuted(params, order, STACKED), permuted(grads, order, STACKED))
    here = permuted(run(params, grads), order, STACKED)
    for a, b in zip(jax.tree.leaves(there), jax.tree.leaves(here), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
