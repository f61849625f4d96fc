"""Partial training: a frozen stack with small trained matrices beside it (LoRA), two optimizers, and an average (EMA).

One tree of labels says everything. Frozen leaves have no gradient and no optimizer state; fsdp splits them too, so that
they cost 1/n of their bytes, and their gathers. The average is carried state: it is split as the parameters whose names
it has. Clip inside the optimizer of a label: its norm is of that label. Source: Hu et al. (2021, arXiv:2106.09685)."""

import jax
import jax.numpy as jnp
import optax

import shardkit as sk

LABELS = {"layers": {"w": "frozen", "down": "lora", "up": "lora"}, "head": "head"}
TRAINED = jax.tree.map(lambda label: label != "frozen", LABELS)
OPTIMIZERS = {"frozen": optax.set_to_zero(), "lora": optax.adam(1e-2), "head": optax.sgd(0.01)}


def init(key):
    w_key, down_key, head_key = jax.random.split(key, 3)
    w = jax.random.normal(w_key, (4, 16, 16)) / 4
    down = jax.random.normal(down_key, (4, 16, 2)) / 4
    layers = {"w": w, "down": down, "up": jnp.zeros((4, 2, 16))}
    return {"layers": layers, "head": jax.random.normal(head_key, (16, 1)) / 4}


def apply_layer(layer, x):
    frozen = x @ layer["w"]
    trained = x @ layer["down"] @ layer["up"]
    return x + jnp.tanh(frozen + trained)


def loss_fn(params, batch, keys):
    x = sk.scan_layers(apply_layer, params["layers"], batch["x"])
    return sk.Mean.of(((x @ params["head"])[:, 0] - batch["y"]) ** 2)


def select_lora(params):
    return {"layers": {"down": params["layers"]["down"], "up": params["layers"]["up"]}}


def make(mesh, plan):
    grad_fn = sk.value_and_grad(loss_fn, trained=TRAINED)
    optimizer = optax.multi_transform(OPTIMIZERS, LABELS)

    def carry(average, metrics, params):
        return optax.incremental_update(select_lora(params), average, 0.1)

    train = sk.make_train_step(grad_fn, optimizer, mesh=mesh, plan=plan, carry=carry)
    return train.step, train.init(init, jax.random.key(0), carried=select_lora)
