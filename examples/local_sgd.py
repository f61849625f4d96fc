"""A strategy of your own: local SGD. Each replica trains alone, and after every few steps the replicas are averaged.

Each replica has a row of every leaf; no gradient is reduced. Source: Stich (2018, arXiv:1805.09767)."""

import jax
import jax.numpy as jnp
import optax

import shardkit as sk


def replicas(axis):
    return sk.strategy("replicas", axis, rank=0, batch_dim=0, place=lambda leaf: sk.Split(0))


def own_loss(loss_fn):  # from a loss that returns a Mean: the mean over the examples of this device's replica
    return lambda rows, *data: jnp.divide(*loss_fn(jax.tree.map(lambda x: x[0], rows), *data))


def averaging(optimizer, every):
    def update(grads, state, params):
        def average(updates):
            return jax.tree.map(lambda u, p: jnp.mean(p + u, 0, keepdims=True) - p, updates, params)

        grads = jax.tree.map(lambda g: g * len(g), grads)  # the step divides by the weights of all replicas
        updates, inner = jax.vmap(optimizer.update)(grads, state[1], params)  # each row by its own norm
        return jax.lax.cond((state[0] + 1) % every == 0, average, lambda u: u, updates), (state[0] + 1, inner)

    return optax.GradientTransformation(lambda params: (jnp.int32(0), jax.vmap(optimizer.init)(params)), update)


if __name__ == "__main__":
    sk.simulate_devices(8)
    grad_fn = sk.value_and_grad(own_loss(lambda w, x, keys: sk.Mean.of((x @ w - x[:, 0] + 2 * x[:, 1]) ** 2)))
    sgd = averaging(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), every=4)
    init, step = sk.make_train_step(grad_fn, sgd, mesh=sk.make_mesh(data=8), plan=replicas("data"))
    state = init(jnp.zeros((8, 2)), jax.random.key(0))
    for batch in jax.random.normal(jax.random.key(1), (60, 64, 2)):
        state, metrics = step(state, batch)
    assert metrics["loss"] < 1e-4 and jnp.allclose(state.params, jnp.array([[1.0, -2.0]]), atol=1e-2)
