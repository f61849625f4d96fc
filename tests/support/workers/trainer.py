"""A trainer that is given a DistributedConfig and two datasets; the same text runs on one device and on many hosts."""

import json
import os
import sys
from pathlib import Path

import jax
import numpy as np
import optax

import shardkit as sk


def dataset(seed, count):
    """Samples of a linear function."""
    x = np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)
    return [{"x": row, "y": row @ np.array([1, -2, 3, 0.5], np.float32)} for row in x]


def loss_fn(params, batch, keys):
    """Squared error."""
    return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean()


def train(config, train_set, validation_set, *, steps=12, batch=8):
    """Training and validation losses; `config` alone says on what."""
    sk.runtime.initialize(config)
    mesh = config.mesh()
    plan = sk.dp("data")
    init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(0.1), mesh=mesh, plan=plan)
    evaluate = sk.make_eval_step(loss_fn, mesh=mesh, plan=plan)
    state = init({"w": np.zeros(4, np.float32)}, jax.random.key(0))
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
    found = train(sk.DistributedConfig.from_environment(backend="gloo"), dataset(0, 40), dataset(1, 16))
    if os.environ["RANK"] == "0":
        Path(sys.argv[1]).write_text(json.dumps(found))
