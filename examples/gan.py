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


def init(key):
    in_key, layers_key, out_key, generator_key = jax.random.split(key, 4)
    layers = {"w": jax.random.normal(layers_key, (2, 16, 16)) / 4, "b": jnp.zeros((2, 16))}
    critic = {
        "in": jax.random.normal(in_key, (2, 16)) / 4,
        "layers": layers,
        "out": jax.random.normal(out_key, (16, 1)) / 4,
    }
    generator = {"w": jax.random.normal(generator_key, (2, 2)) / 4, "b": jnp.zeros(2)}
    return {"critic": critic, "generator": generator}


def apply_layer(layer, x):
    return x + jax.nn.gelu(x @ layer["w"] + layer["b"][None])


def score(critic, x):
    hidden = sk.scan_layers(apply_layer, critic["layers"], x @ critic["in"])
    return (hidden @ critic["out"])[:, 0]


def generate(generator, keys):
    # A key for each example, so that the noise is the same on every mesh.
    noise = jax.vmap(lambda key: jax.random.normal(key, (2,)))(keys)
    return noise @ generator["w"] + generator["b"][None]


def gradient_penalty(critic, real, fake, keys):
    """How far the slope of the critic is from 1, at a point between each real example and a fake one."""
    fraction = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 1), (1,)))(keys)
    between = fraction * real + (1 - fraction) * fake
    slope = jax.grad(lambda x: jnp.sum(score(critic, x)))(between)
    length = jnp.sqrt(jnp.sum(slope**2, -1) + 1e-12)  # the root of 0 has no derivative
    return sk.Mean.of((length - 1) ** 2)


def critic_loss(params, batch, keys):
    critic = params["critic"]
    fake = generate(params["generator"], keys)
    penalty = gradient_penalty(critic, batch["real"], fake, keys)
    real_score = sk.Mean.of(score(critic, batch["real"]), batch["weight"])
    fake_score = sk.Mean.of(score(critic, fake))
    # The three means have different weights: the real examples may be padded, the others are not.
    loss = fake_score - real_score + 10 * penalty
    return loss, {"real": real_score, "fake": fake_score, "penalty": penalty}


def generator_loss(params, batch, keys):
    fake = generate(params["generator"], keys)
    return sk.Mean.of(-score(params["critic"], fake))


def set_network(state, name, other_state):
    """The state with one of its two networks as another state has it."""
    network = other_state.params[name]
    return state._replace(params=state.params | {name: network})


def make_network_step(name, loss_fn, mesh, plan, steps=None):
    """A step that trains one of the two networks, and its first state."""
    trained = {"critic": name == "critic", "generator": name == "generator"}
    grad_fn = sk.value_and_grad(loss_fn, trained=trained)
    optimizer = optax.masked(OPTIMIZERS[name], trained)
    train = sk.make_train_step(grad_fn, optimizer, mesh=mesh, plan=plan, donate=False, steps=steps)
    return train.step, train.init(init, jax.random.key(0))


def make(mesh, plan):
    critic_step, critic = make_network_step("critic", critic_loss, mesh, plan, steps=5)
    generator_step, generator = make_network_step("generator", generator_loss, mesh, plan)

    def step(critic, generator, batches):
        """The states after one step of the generator, and one of the critic for each batch before it."""
        critic = set_network(critic, "generator", generator)
        critic, metrics = critic_step(critic, batches)
        generator = set_network(generator, "critic", critic)
        # The batch says how many examples to generate; the generator does not see the real ones.
        generator, _ = generator_step(generator, {"real": batches["real"][0]})
        return critic, generator, metrics

    return step, critic, generator


if __name__ == "__main__":
    sk.simulate_devices(8)
    mesh = sk.make_mesh(data=2, fsdp=4)
    plan = sk.chain(sk.dp("data"), sk.fsdp("fsdp", layerwise=("critic.layers",), min_size=1))
    step, critic, generator = make(mesh, plan)
    center = jnp.array([1, -1])  # of the real examples
    for key in jax.random.split(jax.random.key(1), 150):
        real = jax.random.normal(key, (5, 64, 2)) / 2 + center
        batches = {"real": real, "weight": jnp.ones((5, 64))}
        critic, generator, metrics = step(critic, generator, batches)
    network = generator.params["generator"]
    assert jnp.allclose(network["b"], center, atol=0.3), network
