"""WGAN-GP: two networks, each with its optimizer and its step, on one mesh, and a gradient inside of the loss.

The critic takes five steps in one call, `steps=5`, then the generator one. Each step trains one network; `trained=`
freezes the other, of which `optax.masked` holds no state. A state has both networks and hands its own over. Its arrays
are used by two states then, hence `donate=False`. The penalty differentiates the critic by examples, which differ
between devices: it sends nothing, but for layers of fsdp. Source: Gulrajani et al. (2017, arXiv:1704.00028)."""

import jax
import jax.numpy as jnp
import optax

import shardkit as sk

OPTIMIZERS = {"critic": optax.adam(0.01, b1=0.5), "generator": optax.adam(0.01, b1=0.5)}
layer = lambda p, x: x + jax.nn.gelu(x @ p["w"] + p["b"][None])
score = lambda critic, x: (sk.scan_layers(layer, critic["layers"], x @ critic["in"]) @ critic["out"])[:, 0]
noise = jax.vmap(lambda key: jax.random.normal(key, (2,)))  # one key for each example: the same on every mesh
generated = lambda params, keys: noise(keys) @ params["generator"]["w"] + params["generator"]["b"][None]
generator_loss = lambda params, batch, keys: sk.Mean.of(-score(params["critic"], generated(params, keys)))


def init(key):
    draw = lambda *shape: jax.random.normal(jax.random.fold_in(key, len(shape)), shape) / 4
    critic = {"in": draw(2, 16), "layers": {"w": draw(2, 16, 16), "b": jnp.zeros((2, 16))}, "out": draw(16, 1)}
    return {"critic": critic, "generator": {"w": draw(2, 2), "b": jnp.zeros(2)}}


def critic_loss(params, batch, keys):
    real, made = batch["real"], generated(params, keys)
    at = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 1), (1,)))(keys)
    slope = jax.grad(lambda x: jnp.sum(score(params["critic"], x)))(at * real + (1 - at) * made)
    penalty = sk.Mean.of((jnp.sqrt(jnp.sum(slope**2, -1) + 1e-12) - 1) ** 2)
    high, low = sk.Mean.of(score(params["critic"], real), batch["weight"]), sk.Mean.of(score(params["critic"], made))
    return low + -1 * high + 10 * penalty, {"real": high, "made": low, "penalty": penalty}


def make(mesh, plan):
    def of(name, loss_fn, steps=None):
        only = {other: other == name for other in OPTIMIZERS}
        grad_fn, optimizer = sk.value_and_grad(loss_fn, trained=only), optax.masked(OPTIMIZERS[name], only)
        made = sk.make_train_step(grad_fn, optimizer, mesh=mesh, plan=plan, donate=False, steps=steps)
        return made.step, made.init(init, jax.random.key(0))

    def step(c, g, batches):  # the states of critic and generator; a batch for each step of the critic
        c, metrics = critic(c._replace(params=c.params | {"generator": g.params["generator"]}), batches)
        g, _ = generator(g._replace(params=g.params | {"critic": c.params["critic"]}), {"real": batches["real"][0]})
        return c, g, metrics

    (critic, c), (generator, g) = of("critic", critic_loss, steps=5), of("generator", generator_loss)
    return step, c, g


if __name__ == "__main__":
    sk.simulate_devices(8)
    plan = sk.chain(sk.dp("data"), sk.fsdp("fsdp", layerwise=("critic.layers",), min_size=1))
    step, c, g = make(sk.make_mesh(data=2, fsdp=4), plan)
    for key in jax.random.split(jax.random.key(1), 150):
        real = jax.random.normal(key, (5, 64, 2)) / 2 + jnp.array([1, -1])
        c, g, metrics = step(c, g, {"real": real, "weight": jnp.ones((5, 64))})
    assert jnp.allclose(g.params["generator"]["b"], jnp.array([1, -1]), atol=0.3), g.params["generator"]
