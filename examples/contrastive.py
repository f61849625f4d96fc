"""CLIP: a contrastive loss over the whole batch, whose negatives are those of all devices, under any plan.

Each device gathers the embeddings over every axis that splits the batch, `plan.batch_axes`, and computes the rows of
its examples. The gather is differentiated, by a reduce_scatter: an embedding gets the gradients of all rows that it is
in. Examples of weight 0 fill up a batch, and are nobody's negatives.
Source: Radford et al. (2021, arXiv:2103.00020)."""

import jax
import jax.numpy as jnp
import optax

import shardkit as sk


def init_tower(key, features):
    in_key, out_key = jax.random.split(key)
    return {
        "in": jax.random.normal(in_key, (features, 16)) / features**0.5,
        "out": jax.random.normal(out_key, (16, 8)) / 16**0.5,
    }


def init(key):
    image_key, text_key = jax.random.split(key)
    image = init_tower(image_key, 12)
    text = init_tower(text_key, 6)
    return {"image": image, "text": text, "scale": jnp.float32(1)}


def embed(tower, x, keys):
    hidden = jnp.tanh(x @ tower["in"])
    embedding = sk.dropout(hidden, keys, 0.1) @ tower["out"]
    return embedding / jnp.linalg.norm(embedding, axis=-1, keepdims=True)


def make_loss(axes):
    """The loss for a batch whose examples are split over these mesh axes."""

    def loss_fn(params, batch, keys):
        image_keys, text_keys = jax.vmap(jax.random.split, out_axes=1)(keys)
        image = embed(params["image"], batch["image"], image_keys)
        text = embed(params["text"], batch["text"], text_keys)

        # The right partner of a row is the example of the same number in the whole batch. Of 32 examples on 8 devices,
        # device 2 has rows 0 to 3, whose partners are 8 to 11.
        rows = jnp.arange(len(image))
        partners = sk.axis_index(axes) * len(rows) + rows
        is_example = sk.all_gather(batch["weight"], axes)[None] > 0

        def log_likelihood(x, y):
            """The log-probability that each row of x gives its partner, among the rows of y of all devices."""
            # Gathered before the softmax: a softmax over this device's rows has fewer negatives, and so is another
            # loss on each mesh.
            y_all = sk.all_gather(y, axes)
            logits = jnp.exp(params["scale"]) * x @ y_all.T
            logits = jnp.where(is_example, logits, -1e9)
            return jax.nn.log_softmax(logits)[rows, partners]

        losses = -(log_likelihood(image, text) + log_likelihood(text, image)) / 2
        return sk.Mean.of(losses, batch["weight"])

    return loss_fn


if __name__ == "__main__":
    sk.simulate_devices(8)
    mesh = sk.make_mesh(data=2, fsdp=4)
    plan = sk.chain(sk.dp("data"), sk.fsdp("fsdp", min_size=1))
    grad_fn = sk.value_and_grad(make_loss(plan.batch_axes))
    train = sk.make_train_step(grad_fn, optax.adam(0.01), mesh=mesh, plan=plan)
    state = train.init(init, jax.random.key(0))
    for key in jax.random.split(jax.random.key(1), 100):
        image = jax.random.normal(key, (32, 12))
        text = image[:, :6]  # what a pair has in common
        state, metrics = train.step(state, {"image": image, "text": text, "weight": jnp.ones(32)})
    # One right partner among 32: before training the loss is about log(32).
    assert metrics["loss"] < 1 < jnp.log(32), metrics
