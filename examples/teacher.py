"""A student beside a teacher that is its average, and two losses in one step: DINO, with the labels of a few examples.

Teacher, center and count are carried: read by the loss and not differentiated, laid out as the parameters whose names
they have, and updated once per step by `carry`, from the means over all devices and the new parameters. The losses
have weights of their own, which `a + 0.5 * b` keeps; each is a metric too. `accumulate=` is for one loss: leave the
second out, or weight the values of one Mean. Source: Caron et al. (2021, arXiv:2104.14294)."""

import jax
import jax.numpy as jnp
import optax

import shardkit as sk


def init(key):
    keys = jax.random.split(key, 3)
    return {
        "layers": {"w": jax.random.normal(keys[0], (2, 8, 8)) / 4},
        "view": jax.random.normal(keys[1], (8, 12)),
        "label": jax.random.normal(keys[2], (8, 2)),
    }


def init_carried(params):
    return {"teacher": params, "center": jnp.zeros(12), "count": jnp.int32(0)}


def apply_layer(layer, x):
    return x + jnp.tanh(x @ layer["w"])


def compute_features(params, x):
    return sk.scan_layers(apply_layer, params["layers"], x)


def loss_fn(params, batch, keys, carried):
    teacher = carried["teacher"]
    targets = compute_features(teacher, batch["x"]) @ teacher["view"]
    # The student sees an example in part, the teacher all of it.
    features = compute_features(params, sk.dropout(batch["x"], keys, 0.2))

    # Centered and sharpened, so that the two cannot agree on one answer for all examples.
    target_probabilities = jax.nn.softmax((targets - carried["center"][None]) / 0.5)
    log_probabilities = jax.nn.log_softmax(features @ params["view"])
    distillation = sk.Mean.of(-jnp.sum(target_probabilities * log_probabilities, axis=1))

    # A label of -1 is missing: its weight is 0, and its loss, of the class 1, counts nothing.
    labels = jnp.abs(batch["label"])
    losses = optax.softmax_cross_entropy_with_integer_labels(features @ params["label"], labels)
    classification = sk.Mean.of(losses, batch["label"] >= 0)

    # A sum over this device's examples and their number: the step divides the sums over all devices.
    center = sk.Mean(jnp.sum(targets, axis=0), jnp.float32(len(targets)))
    metrics = {"distillation": distillation, "classification": classification, "center": center}
    return distillation + 0.5 * classification, metrics


def carry(carried, metrics, params):
    rate = 0.1 / (1 + 0.1 * carried["count"])

    def move(average, param):
        return average + rate * (param - average)

    return {
        "teacher": jax.tree.map(move, carried["teacher"], params),
        "center": 0.9 * carried["center"] + 0.1 * metrics["center"],
        "count": carried["count"] + 1,
    }


def make(mesh, plan):
    grad_fn = sk.value_and_grad(loss_fn)
    train = sk.make_train_step(grad_fn, optax.adam(0.01), mesh=mesh, plan=plan, carry=carry)
    return train.step, train.init(init, jax.random.key(0), carried=init_carried)


if __name__ == "__main__":
    sk.simulate_devices(8)
    mesh = sk.make_mesh(data=2, fsdp=4)
    plan = sk.chain(sk.dp("data"), sk.fsdp("fsdp", layerwise=("layers",), min_size=1))
    step, state = make(mesh, plan)
    for key in jax.random.split(jax.random.key(1), 60):
        x = jax.random.normal(key, (32, 8))
        label = jnp.int32(x[:, 0] > 0)
        label = jnp.where(jnp.arange(32) < 8, label, -1)  # of the first eight examples alone
        state, metrics = step(state, {"x": x, "label": label})
    # The labels have two classes: before training this loss is about log(2), 0.69.
    assert metrics["classification"] < 0.5, metrics
