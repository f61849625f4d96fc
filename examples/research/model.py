"""Your model: parameters and a loss. Replace all of it; the other two files need `init` and `make_loss`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import shardkit as sk


class Config(NamedTuple):
    features: int = 16
    width: int = 64
    layers: int = 4
    classes: int = 10
    dropout: float = 0.1


def init(key, config):
    width = config.width
    layers = config.layers
    into, up, gate, down, out = jax.random.split(key, 5)

    def draw(key, *shape):
        return jax.random.normal(key, shape) / jnp.sqrt(shape[-2])

    return {
        "into": draw(into, config.features, width),
        "layers": {  # dim 0 counts layers
            "up": draw(up, layers, width, 2 * width),
            "gate": draw(gate, layers, width, 2 * width),
            "down": 0.1 * draw(down, layers, 2 * width, width),
        },
        "out": draw(out, width, config.classes),
    }


def apply_layer(layer, x):
    hidden = jax.nn.silu(x @ layer["gate"]) * (x @ layer["up"])
    return x + hidden @ layer["down"]


def make_loss(config):
    def loss_fn(params, batch, keys):
        x = batch["x"] @ params["into"]
        if keys is not None:  # an evaluation has no keys
            x = sk.dropout(x, keys, rate=config.dropout)
        # scan_layers gathers each layer where a plan has split it. Write a list of layers with sk.gathered.
        x = sk.scan_layers(apply_layer, params["layers"], x)
        logits = x @ params["out"]
        error = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        correct = (jnp.argmax(logits, axis=-1) == batch["label"]).astype(jnp.float32)
        # batch["weight"] is 0 for an example that only fills up the last batch.
        return sk.Mean.of(error, batch["weight"]), {"accuracy": sk.Mean.of(correct, batch["weight"])}

    return loss_fn
