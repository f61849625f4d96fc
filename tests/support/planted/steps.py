"""Wrong training steps: GradFns for assert_same_training. Wrong gradient code: tests/testing/test_certify.py."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import shardkit as sk

RNG = np.random.default_rng(1)
PARAMS = {"w": RNG.normal(size=(4, 4)).astype(np.float32), "b": np.zeros(4, np.float32)}
WEIGHTED = {"x": RNG.normal(size=(8, 4)).astype(np.float32), "weight": np.float32([3, 0, 1, 0, 5, 1, 0, 1])}


def right(params, batch, keys):
    error = jnp.sum((batch["x"] @ params["w"] + params["b"][None, :] - 1) ** 2, 1)
    return sk.Mean.of(error, batch["weight"])


def mean_of_means(params, batch, keys):
    sums = right(params, batch, keys)
    return sums.total / jnp.maximum(sums.weight, 1)


def counted_examples(params, batch, keys):
    return right(params, batch, keys)._replace(weight=jnp.float32(len(batch["weight"])))


def summed_inside(params, batch, keys):
    """The total is reduced already, but not the weight that goes with it."""
    sums = right(params, batch, keys)
    return sums._replace(total=sk.vary(sk.all_reduce(sums.total, "data"), "data"))


def noise_by_device(params, batch, keys):
    keep = jax.random.bernoulli(sk.fold_axis(jax.random.key(0), "data"), 0.5, batch["x"].shape)
    return right(params, {**batch, "x": jnp.where(keep, batch["x"], 0)}, keys)


def noise_on_one_device(params, batch, keys):
    keep = jax.random.bernoulli(jax.random.key(0), 0.5, batch["x"].shape)
    return right(params, {**batch, "x": jnp.where(keep, batch["x"], 0)}, keys)


def clip_per_shard(params, batch, keys, *, scale=1):
    sums, aux, grads = sk.value_and_grad(right)(params, batch, keys, scale=scale)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    return sums, aux, jax.tree.map(lambda g: g * jnp.minimum(1, 1 / norm), grads)


class Step(NamedTuple):
    """A GradFn on the mesh, that of one device, and what assert_same_training says."""

    name: str
    grad_fn: Callable[..., Any]
    reference: Callable[..., Any]
    says: str


OWN = sk.value_and_grad(right)
STEPS = [
    Step("mean of means in a step", sk.value_and_grad(mean_of_means), OWN, r"step 0: the loss must equal one device's"),
    Step("examples counted, not weights", sk.value_and_grad(counted_examples), OWN, r"step 0: the loss must equal"),
    Step("total reduced, weight not", sk.value_and_grad(summed_inside), OWN, r"\(everywhere 4x one device's\)"),
    Step(
        "dropout by device",
        sk.value_and_grad(noise_by_device),
        sk.value_and_grad(noise_on_one_device),
        r"step 0: the loss must equal one device's",
    ),
    Step("clip per shard in a step", clip_per_shard, clip_per_shard, r"the gradient of [bw] must equal one device's"),
]
