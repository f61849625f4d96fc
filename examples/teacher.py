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
    layers = {"w": jax.random.normal(keys[0], (2, 8, 8)) / 4}
    return {"layers": layers, "view": jax.random.normal(keys[1], (8, 12)), "label": jax.random.normal(keys[2], (8, 2))}


def first(params):
    return {"teacher": params, "center": jnp.zeros(12), "count": jnp.int32(0)}


def features(params, x):
    return sk.scan_layers(lambda p, x: x + jnp.tanh(x @ p["w"]), params["layers"], x)


def loss_fn(params, batch, keys, carried):
    teacher, student = features(carried["teacher"], batch["x"]), features(params, sk.dropout(batch["x"], keys, 0.2))
    wanted = teacher @ carried["teacher"]["view"]
    sharp = jax.nn.softmax((wanted - carried["center"][None]) / 0.5)
    alike = sk.Mean.of(-jnp.sum(sharp * jax.nn.log_softmax(student @ params["view"]), 1))
    each = optax.softmax_cross_entropy_with_integer_labels(student @ params["label"], jnp.abs(batch["label"]))
    named = sk.Mean.of(each, batch["label"] >= 0)
    center = sk.Mean(jnp.sum(wanted, 0), jnp.float32(len(wanted)))  # divided by the count of the whole batch
    return alike + 0.5 * named, {"alike": alike, "named": named, "center": center}


def carry(old, metrics, params):
    rate = 0.1 / (1 + 0.1 * old["count"])
    teacher = jax.tree.map(lambda average, new: average + rate * (new - average), old["teacher"], params)
    return {"teacher": teacher, "center": 0.9 * old["center"] + 0.1 * metrics["center"], "count": old["count"] + 1}


def make(mesh, plan):
    grad_fn = sk.value_and_grad(loss_fn)
    made = sk.make_train_step(grad_fn, optax.adam(0.01), mesh=mesh, plan=plan, carry=carry)
    return made.step, made.init(init, jax.random.key(0), carried=first)


if __name__ == "__main__":
    sk.simulate_devices(8)
    plan = sk.chain(sk.dp("data"), sk.fsdp("fsdp", layerwise=("layers",), min_size=1))
    step, state = make(sk.make_mesh(data=2, fsdp=4), plan)
    for key in jax.random.split(jax.random.key(1), 60):
        x = jax.random.normal(key, (32, 8))
        label = jnp.where(jnp.arange(32) < 8, jnp.int32(x[:, 0] > 0), -1)  # -1: none
        state, metrics = step(state, {"x": x, "label": label})
    assert metrics["named"] < 0.5, metrics
