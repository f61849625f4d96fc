"""CLIP: a contrastive loss over the whole batch, whose negatives are those of all devices, under any plan.

Each device gathers the embeddings over every axis that splits the batch, `plan.batch_axes`, and has the rows of its own
examples. The gather is differentiated, by a reduce_scatter: an embedding gets the gradients of all rows that it is in.
Examples of weight 0 fill up a batch, and are nobody's negatives.
Source: Radford et al. (2021, arXiv:2103.00020)."""

import jax
import jax.numpy as jnp
import optax

import shardkit as sk


def init(key):
    shapes = {"image": ((12, 16), (16, 8)), "text": ((6, 16), (16, 8))}
    draw = lambda shape: jax.random.normal(key, shape) / shape[0] ** 0.5
    return {name: {"in": draw(a), "out": draw(b)} for name, (a, b) in shapes.items()} | {"scale": jnp.float32(1)}


def embedded(tower, x, keys):
    y = sk.dropout(jnp.tanh(x @ tower["in"]), keys, 0.1) @ tower["out"]
    return y / jnp.linalg.norm(y, axis=-1, keepdims=True)


def clip(axes):
    def loss_fn(params, batch, keys):
        image, text = (embedded(params[name], batch[name], keys) for name in ("image", "text"))
        rows = jnp.arange(len(image))
        pairs = sk.axis_index(axes) * len(rows) + rows  # where the own examples are among those of all
        counts = sk.all_gather(batch["weight"], axes)[None] > 0

        def right(x, y):  # the log-probability of each pair among the pairs with the y of all devices
            logits = jnp.exp(params["scale"]) * x @ sk.all_gather(y, axes).T
            return jax.nn.log_softmax(jnp.where(counts, logits, -1e9))[rows, pairs]

        return sk.Mean.of(-(right(image, text) + right(text, image)) / 2, batch["weight"])

    return loss_fn


if __name__ == "__main__":
    sk.simulate_devices(8)
    mesh, plan = sk.make_mesh(data=2, fsdp=4), sk.chain(sk.dp("data"), sk.fsdp("fsdp", min_size=1))
    grad_fn = sk.value_and_grad(clip(plan.batch_axes))
    train = sk.make_train_step(grad_fn, optax.adam(0.01), mesh=mesh, plan=plan)
    state = train.init(init, jax.random.key(0))
    for key in jax.random.split(jax.random.key(1), 60):  # what is common to a pair is its first six numbers
        image = jax.random.normal(key, (32, 12))
        state, metrics = train.step(state, {"image": image, "text": image[:, :6], "weight": jnp.ones(32)})
    assert metrics["loss"] < 1 < jnp.log(32), metrics
