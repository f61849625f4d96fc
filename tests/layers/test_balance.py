"""Experts that a bias balances: what it changes, on which mesh, and how soon."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardkit as sk
from shardkit.layers.routing import balance_bias
from support.layouts import mesh_of

RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(0.6, size=(24, 3, 6)).astype("f"), "weight": RNG.integers(0, 3, (24, 3)).astype("f")}
PARAMS = {"router": RNG.normal(size=(6, 8)).astype("f"), "experts": RNG.normal(size=(8, 6, 6)).astype("f") / 3}


def loss_fn(params, batch, keys, bias, axis=None):
    weight, answer = batch["weight"], lambda w, x, dot: jnp.tanh(dot(x, w))
    given = batch["x"], params["router"], params["experts"], answer, axis
    y, stats = sk.layers.moe(*given, routing=sk.layers.Capacity(8), weights=weight, bias_E=bias)
    return sk.Mean.of(jnp.mean((y - batch["x"]) ** 2, -1), weight), {"choices": stats.choices}


# Catches gates that see the bias, are in another order, or have another gradient; choices that do not see it.
def test_the_bias_chooses_and_the_scores_weigh():
    total = lambda params, bias: loss_fn(params, BATCH, None, bias)[0].total  # noqa: E731
    runs = [jax.jit(lambda bias=bias: jax.value_and_grad(total)(PARAMS, bias))() for bias in (None, np.zeros(8, "f"))]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), *runs)
    assert not np.any(jax.jit(jax.grad(total, 1))(PARAMS, np.full(8, 0.1, "f")))
    logits, bias = RNG.normal(size=(20, 8)).astype("f"), RNG.normal(size=8).astype("f")
    route = jax.jit(sk.layers.route, static_argnames=("top_k", "normalize_gates"))
    got = route(logits, top_k=2, bias_E=bias, normalize_gates=False)
    scores = np.asarray(jax.jit(jax.nn.softmax)(logits))
    np.testing.assert_array_equal(got.expert, np.argsort(-scores - bias, axis=1)[:, :2])
    np.testing.assert_array_equal(got.gate, np.take_along_axis(scores, np.asarray(got.expert), 1))
    # A bias that leaves only experts without any probability: the gates are those of their logits.
    far = route(np.float32([[300, 0, 1, 0]]), top_k=2, bias_E=np.float32([-1.5, 0, 0, 0]))
    np.testing.assert_allclose(np.max(far.gate), np.e / (np.e + 1), rtol=1e-6)  # of logits 1 and 0


def trained(steps, accumulate=1, **sizes):
    grad_fn = sk.value_and_grad(lambda params, batch, keys, bias: loss_fn(params, batch, keys, bias, "expert"))
    carry = lambda bias, metrics, _: balance_bias(bias, metrics["choices"], rate=0.02)  # noqa: E731
    options = {"plan": sk.chain(sk.dp("data"), sk.ep("expert")), "accumulate": accumulate, "carry": carry}
    init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh_of(**sizes), **options)
    state, rows = init(PARAMS, jax.random.key(0), carried=jnp.zeros(8)), []
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        rows.append(jax.device_get(((metrics["choices"], state.carried), (metrics["loss"], state.params))))
    return [jax.tree.map(lambda *each: np.stack(each), *part) for part in zip(*rows, strict=True)]


# Catches choices of one device or microbatch, a bias that rounding moves on one mesh alone, and the wrong sign.
def test_a_step_balances_a_skewed_router_alike_on_every_mesh():
    exact, near = trained(3, data=3, expert=2, accumulate=2)
    wanted, wanted_near = trained(3, data=1, expert=1)
    jax.tree.map(np.testing.assert_array_equal, exact, wanted)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), near, wanted_near)
    largest = 8 * trained(30, data=2, expert=4)[0][0].max(axis=1)
    assert largest[0] > 2.5 and largest[-10:].mean() < 1.8
    moved = balance_bias(jnp.zeros((3, 3)), np.float32([[1 / 3] * 3, [0] * 3, [3, 2, 1]]), rate=0.5)
    np.testing.assert_array_equal(moved, [[0, 0, 0], [0, 0, 0], [-0.5, 0, 0.5]])
