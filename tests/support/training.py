"""Training steps of the conformance list's rows, held to one device: the laws' checks, and optimizers for them."""

from __future__ import annotations

from functools import cache

import jax
import numpy as np
import optax

import shardkit as sk
from support import conformance

KEY = jax.random.key(7)


def recording_sgd(rate: float) -> optax.GradientTransformation:
    """SGD that keeps the gradient it was given, so that gradients are compared themselves."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jax.numpy.zeros_like, params),
        lambda grads, state, params=None: (jax.tree.map(lambda g: -rate * g, grads), grads),
    )


def lenient(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """optax itself promotes an integer count; everything around it stays strict."""

    def update(grads, state, params=None):
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(grads, state, params)

    return optax.GradientTransformation(optimizer.init, update)


OPTIMIZERS = {
    "sgd": lambda: recording_sgd(0.5),
    "adamw": lambda: lenient(optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3))),
    # With its usual epsilon, 1e-8, Adam makes much of the rounding of a small gradient: of layers as deep as four, one
    # device summing in microbatches is then 4e-5 off itself, and with 1e-6 still 2e-5.
    "calm adamw": lambda: lenient(optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3, eps=1e-5))),
    "adafactor": lambda: lenient(optax.adafactor(1e-2, min_dim_size_to_factor=4)),
}
# Adam divides a leaf whose true gradient is zero by its own rounding noise: it may move by the rate in every step.
ZERO_LEAF = {"sgd": 1e-6, "adamw": 3 * 1e-3, "calm adamw": 3 * 1e-3, "adafactor": 3 * 1e-2}


@cache
def expected(model: conformance.ModelRow, optimizer: str, steps: int) -> conformance.Reference:
    return conformance.reference(model, OPTIMIZERS[optimizer](), steps, KEY)


def built(row, model, optimizer, grad_fn=None, **options):
    grad_fn = grad_fn or sk.value_and_grad(model.loss(row.model_axis))
    mesh = conformance.make_mesh(row)
    return sk.make_train_step(grad_fn, OPTIMIZERS[optimizer](), mesh=mesh, plan=row.plan(), **options)


def check(row, model, optimizer, steps, **options):
    init, step = built(row, model, optimizer, **options)
    state = init(model.params(), KEY)
    want = expected(model, optimizer, steps)
    for index in range(steps):
        state, metrics = step(state, model.batch(index))
        np.testing.assert_allclose(metrics["loss"], want.losses[index], rtol=1e-5)
        for name, value in want.metrics[index].items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-5)
        if optimizer == "sgd" and index == 0:
            conformance.assert_close(sk.unpadded(state.opt_state), want.grads, 1e-5, model.zero_leaves, 1e-6)
    conformance.assert_close(sk.unpadded(state.params), want.params, 1e-5, model.zero_leaves, ZERO_LEAF[optimizer])
    assert_replicas_agree(state)


def assert_replicas_agree(state):
    """Devices that hold the same piece of a leaf hold the same bits."""
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        pieces = {}
        for shard in leaf.addressable_shards:
            bits = np.asarray(shard.data).tobytes()
            assert pieces.setdefault(str(shard.index), bits) == bits
