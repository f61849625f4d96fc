"""A trainer that is given a DistributedConfig and two datasets; the same text runs on one device and on many hosts."""

import json
import os
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import shardkit as sk


def dataset(seed, count):
    """Samples of a linear function."""
    x = np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)
    return [{"x": row, "y": row @ np.array([1, -2, 3, 0.5], np.float32)} for row in x]


def params():
    """An embedding, two layers of two matrices each, and a head."""
    rng = np.random.default_rng(7)
    shapes = {"embed": (4, 8), "layers": {"up": (2, 8, 16), "down": (2, 16, 8)}, "head": (8,)}
    draw = partial(rng.normal, scale=0.3)
    return jax.tree.map(lambda shape: draw(size=shape).astype(np.float32), shapes, is_leaf=lambda x: type(x) is tuple)


RULES = {"embed": P(), "layers": {"up": P(None, None, "model"), "down": P(None, "model")}, "head": P()}


def embed(shared, batch, keys):
    """The input of the first layer."""
    return batch["x"] @ shared["embed"]


def stage(layers, x, keys):
    """Some of the layers; each matrix is split over "model"."""

    def layer(w, x):
        return x + sk.layers.row_linear(jnp.tanh(sk.layers.column_linear(x, w["up"], "model")), w["down"], "model")

    return sk.scan_layers(layer, layers, x)


def head(shared, x, batch):
    """Squared error."""
    return ((x @ shared["head"] - batch["y"]) ** 2).mean()


def train(config, train_set, validation_set, *, steps=8, batch=8):
    """Training and validation losses; `config` alone says on what."""
    sk.runtime.initialize(config)
    mesh, plan, precision = config.mesh(), config.plan(RULES), config.mixed_precision
    pipe = sk.pipeline(sk.schedules.one_f_one_b(mesh.shape["stage"], microbatches=2), "stage")
    grad_fn, loss = pipe.value_and_grad(embed, stage, head), pipe.loss(embed, stage, head)
    init, step = sk.make_train_step(grad_fn, optax.sgd(0.01), mesh=mesh, plan=plan, precision=precision)
    evaluate = sk.make_eval_step(loss, mesh=mesh, plan=plan, precision=precision)
    state = init(params(), jax.random.key(0))
    loads = {"batch": batch, "mesh": mesh, "spec": plan.batch_spec(mesh)}
    losses, validation = [], []
    batches = sk.runtime.loader(train_set, seed=3, **loads)
    for index in range(steps):
        state, metrics = step(state, next(batches))
        losses.append(float(metrics["loss"]))
        if index % 4 == 3:
            held_out = sk.runtime.loader(validation_set, seed=None, epochs=1, **loads)
            validation.append(float(np.mean([float(evaluate(state.params, each)["loss"]) for each in held_out])))
    return {"losses": losses, "validation": validation}


if __name__ == "__main__":
    config = sk.DistributedConfig.from_environment(backend="gloo", **json.loads(sys.argv[2]))
    found = train(config, dataset(0, 40), dataset(1, 16))
    if os.environ["RANK"] == "0":
        Path(sys.argv[1]).write_text(json.dumps(found))
