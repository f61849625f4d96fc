"""Partial training: a frozen stack with small trained matrices beside it (LoRA), two optimizers, and an average (EMA).

One tree of labels says everything. Of frozen leaves no gradient is computed or sent, and the optimizer has no state;
fsdp splits them as all others, so that they cost 1/n of their bytes, and their gathers. The average is carried state:
it is split as the parameters whose names it has. Clip gradients inside the optimizer of one label, whose norm is theirs
alone. Source: Hu et al. (2021, arXiv:2106.09685)."""

import jax
import jax.numpy as jnp
import optax

import shardkit as sk

LABELS = {"layers": {"w": "frozen", "down": "lora", "up": "lora"}, "head": "head"}
TRAINED = jax.tree.map(lambda label: label != "frozen", LABELS)
layer = lambda p, x: x + jnp.tanh(x @ p["w"] + x @ p["down"] @ p["up"])
OPTIMIZERS = {"frozen": optax.set_to_zero(), "lora": optax.adam(1e-2), "head": optax.sgd(0.01)}


def init(key):
    w, down, head = (jax.random.normal(key, shape) / 4 for shape in ((4, 16, 16), (4, 16, 2), (16, 1)))
    return {"layers": {"w": w, "down": down, "up": jnp.zeros((4, 2, 16))}, "head": head}


def loss_fn(params, batch, keys):
    x = sk.scan_layers(layer, params["layers"], batch["x"])
    return sk.Mean.of(((x @ params["head"])[:, 0] - batch["y"]) ** 2)


def make(mesh, plan):
    grad_fn = sk.value_and_grad(loss_fn, trained=TRAINED)
    optimizer = optax.multi_transform(OPTIMIZERS, LABELS)
    average = lambda old, metrics, params: optax.incremental_update(tuned(params), old, 0.1)
    made = sk.make_train_step(grad_fn, optimizer, mesh=mesh, plan=plan, carry=average)
    return made.step, made.init(init, jax.random.key(0), carried=tuned)


def tuned(params):
    return {"layers": {name: params["layers"][name] for name in ("down", "up")}}
