"""The FSDP x TP transformer of benchmarks/large_model.py: the same numbers on every mesh, and its traffic by hand."""

from fractions import Fraction
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk
from benchmarks import large_model
from shardkit._jax.jaxprs import walk
from shardkit.models import transformer
from support.conformance import weights

CONFIG = transformer.Config(vocabulary=64, layers=3, dim=16, heads=4, kv_heads=2, hidden=32)


@cache
def reference():
    """Loss and gradient of the reference transformer on one device, in plain jax."""
    tokens = jax.random.randint(jax.random.key(1), (8, 8), 0, 64)
    batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, 1)}
    params = weights(CONFIG, 0)

    def loss(params):
        mean, _ = transformer.loss_fn(CONFIG)(params, batch, None)
        return mean.total / mean.weight

    return batch, params, *jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.deep  # a benchmark; models.transformer: the laws
@pytest.mark.parametrize("fsdp, tp", [(4, 2), (1, 1), (1, 2), (2, 1), (2, 2)])
def test_it_is_the_reference_transformer_on_every_mesh(fsdp, tp):
    batch, params, loss, grads = reference()
    mesh = sk.make_mesh(jax.devices()[: fsdp * tp], fsdp=fsdp, model=tp)
    grad_fn = sk.value_and_grad(large_model.loss_fn(CONFIG, tp))
    init, step = sk.make_train_step(grad_fn, optax.sgd(1.0), mesh=mesh, plan=large_model.make_plan())
    state, metrics = step(init(params, jax.random.key(0)), batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    expected = jax.tree.map(lambda p, g: p - g, params, grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), state.params, expected)


def test_what_70_billion_parameters_send_on_512_chips():
    config = large_model.MODELS["70b"]
    step, args = large_model.describe_step(config, fsdp=64, tp=8, batch=4, tokens=4096)
    assert sum(x.size for x in jax.tree.leaves(args[0].params)) == 70_553_706_496
    with jax.numpy_dtype_promotion("standard"):  # optax does not trace under strict promotion
        census = sk.census(step, *args)
        assert sk.lint(step, *args) == []
    # Between the blocks activations are split over tokens: each block gathers and scatters once forward; backward
    # repeats both gathers and the scatter in between, and transposes all four. Embedding and head have one each.
    layers, activation = config.layers, 4 * 4096 * config.dim * 2
    gathers, scatters = 6 * layers + 2, 5 * layers + 2
    assert census.count(axis="model", kind="all_gather") == gathers
    assert census.count(axis="model", kind="reduce_scatter") == scatters
    each = Fraction(7, 8) * activation
    assert census.sent(axis="model", kind="all_gather") == gathers * each
    assert census.sent(axis="model", kind="reduce_scatter") == scatters * each
    # FSDP gathers each split weight forward and again backward (the head and the table once), in bfloat16.
    weights = {name: x.size for name, x in args[0].params["layers"].items() if "norm" not in name}
    outer = 2 * config.vocabulary * config.dim
    share = Fraction(63, 64) * Fraction(1, 8) * 2
    assert census.sent(axis="fsdp", kind="all_gather") == share * (2 * sum(weights.values()) + outer)
    assert census.sent(axis="fsdp", kind="reduce_scatter") == share * (sum(weights.values()) + outer)


def test_tracing_does_not_grow_with_the_number_of_chips():
    """The same program whatever the mesh: what is traced for 4096 chips has as many equations as for 8."""

    def equations(fsdp, tp):
        step, args = large_model.describe_step(large_model.MODELS["70b"], fsdp=fsdp, tp=tp, batch=1, tokens=4096)
        with jax.numpy_dtype_promotion("standard"):
            return sum(1 for _ in walk(step.trace(*args).jaxpr.jaxpr))

    assert equations(4, 2) == equations(1024, 4)
