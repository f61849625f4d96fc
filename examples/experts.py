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
    router = 3 * draw(WIDTH, EXPERTS)  # large, so that the choices are uneven at first
    return {"layers": {"experts": experts, "shared": shared, "router": router}}


def mlp(w, x, dot=jnp.dot):
    """One expert, or with the `dot` of `moe`, which multiplies each token by its expert's matrix, all of a device."""
    return dot(jnp.tanh(dot(x, w["into"])), w["out"])


def take_layer(layers, number):
    return jax.tree.map(lambda leaf: leaf[number], layers)


def loss_fn(params, batch, keys, bias, *, axis):
    x = batch["x"]
    choices = []
    for number in range(LAYERS):
        layer = take_layer(params["layers"], number)
        routing = sk.layers.Dropless()
        y, stats = sk.layers.moe(x, layer["router"], layer["experts"], mlp, axis, routing=routing, bias_E=bias[number])
        x = x + y + mlp(layer["shared"], x)
        choices.append(stats.choices.total)
        count = stats.choices.weight  # of all choices: the same in every layer
    losses = jnp.sum((x - batch["y"]) ** 2, axis=1)
    return sk.Mean.of(losses), {"choices": sk.Mean(jnp.stack(choices), count)}


def carry(bias, metrics, params):
    return sk.layers.balance_bias(bias, metrics["choices"], rate=0.003)


def make(mesh, plan, axis):
    grad_fn = sk.value_and_grad(partial(loss_fn, axis=axis))
    train = sk.make_train_step(grad_fn, optax.adam(0.01), mesh=mesh, plan=plan, carry=carry)
    bias = jnp.zeros((LAYERS, EXPERTS))
    return train.step, train.init(init, jax.random.key(0), carried=bias)


if __name__ == "__main__":
    sk.simulate_devices(8)
    mesh = sk.make_mesh(data=2, expert=4)
    step, state = make(mesh, sk.chain(sk.dp("data"), sk.ep("expert")), "expert")
    largest_shares = []  # in each layer the share of the most chosen expert; an eighth is even
    for key in jax.random.split(jax.random.key(1), 200):
        x = jax.random.normal(key, (64, WIDTH)) + 1
        y = jnp.roll(x, 1, axis=1) ** 2
        state, metrics = step(state, {"x": x, "y": y})
        largest_shares.append(metrics["choices"].max(1))
    begin = largest_shares[0]
    end = jnp.mean(jnp.stack(largest_shares[-20:]), axis=0)
    assert end.max() < 0.25 < begin.min(), (begin, end)
