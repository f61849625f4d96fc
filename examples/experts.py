"""Experts that are balanced without a loss, beside one that every token shares, as in DeepSeek-V3.

The bias of each expert is carried: it moves against the choices of the whole batch once a step, and no gradient reaches
it. The shared expert is a layer like any other, added to what `moe` returns: no collective waits for it, so that it can
run while tokens travel. Sources: Wang et al. (2024, arXiv:2408.15664); DeepSeek-V3 (2024, arXiv:2412.19437)."""

from functools import partial

import jax
import jax.numpy as jnp
import optax

import shardkit as sk

LAYERS, EXPERTS, WIDTH, HIDDEN = 2, 8, 8, 16


def init(key):
    keys = iter(jax.random.split(key, 5))

    def draw(*shape):
        return jax.random.normal(next(keys), (LAYERS, *shape)) / shape[-2] ** 0.5

    experts = {"into": draw(EXPERTS, WIDTH, HIDDEN), "out": draw(EXPERTS, HIDDEN, WIDTH)}
    shared = {"into": draw(WIDTH, HIDDEN), "out": draw(HIDDEN, WIDTH)}
    return {"layers": {"experts": experts, "shared": shared, "router": 3 * draw(WIDTH, EXPERTS)}}


def mlp(w, x, dot=jnp.dot):
    return dot(jnp.tanh(dot(x, w["into"])), w["out"])


def loss_fn(params, batch, keys, bias, *, axis):
    x, chosen = batch["x"], []
    for number in range(LAYERS):
        own = jax.tree.map(lambda x, i=number: x[i], params["layers"])
        router, experts = own["router"], own["experts"]
        y, stats = sk.layers.moe(x, router, experts, mlp, axis, routing=sk.layers.Dropless(), bias_E=bias[number])
        x = x + y + mlp(own["shared"], x)
        chosen.append(stats.choices)
    choices = sk.Mean(jnp.stack([each.total for each in chosen]), chosen[0].weight)
    return sk.Mean.of(jnp.sum((x - batch["y"]) ** 2, 1)), {"choices": choices}


def carry(bias, metrics, params):
    return sk.layers.balance_bias(bias, metrics["choices"], rate=0.003)


def make(mesh, plan, axis):
    grad_fn = sk.value_and_grad(partial(loss_fn, axis=axis))
    made = sk.make_train_step(grad_fn, optax.adam(0.01), mesh=mesh, plan=plan, carry=carry)
    return made.step, made.init(init, jax.random.key(0), carried=jnp.zeros((LAYERS, EXPERTS)))


if __name__ == "__main__":
    sk.simulate_devices(8)
    step, state = make(sk.make_mesh(data=2, expert=4), sk.chain(sk.dp("data"), sk.ep("expert")), "expert")
    most = []  # the share of the most chosen expert of each layer; an eighth is even
    for key in jax.random.split(jax.random.key(1), 200):
        x = jax.random.normal(key, (64, WIDTH)) + 1
        state, metrics = step(state, {"x": x, "y": jnp.roll(x, 1, 1) ** 2})
        most.append(metrics["choices"].max(1))
    assert jnp.max(jnp.mean(jnp.stack(most[-20:]), 0)) < 0.25 < most[0].min(), (most[0], most[-1])
