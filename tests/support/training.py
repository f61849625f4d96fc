"""Rows of the conformance list under the laws, and what they are trained with."""

from functools import cache
from typing import Any

import jax
import numpy as np
import optax

import shardkit as sk
from shardkit.testing import LAWS, Row, laws, one_device, prove
from shardkit.testing.one_device import Reference
from shardkit.testing.prove import Proof, choose_relative
from support.conformance import ModelRow, PlanRow

KEY = jax.random.key(7)
STEPS = 3
# Tracing once more, as another process, is half of what Python does for a row: on some of them only.
ONCE = tuple(law for law in LAWS if law not in (laws.processes_agree, laws.equal_for_all_inputs))


def recording_sgd(rate: float) -> optax.GradientTransformation:
    """SGD that keeps the gradient it was given, so that gradients are compared themselves."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jax.numpy.zeros_like, params),
        lambda grads, state, params=None: (jax.tree.map(lambda g: -rate * g, grads), grads),
    )


def lenient(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """optax itself promotes an integer count; everything around it stays strict."""
    optimizer = optax.with_extra_args_support(optimizer)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(grads, state, params, **extra)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


OPTIMIZERS = {
    "sgd": lenient(optax.sgd(0.5, momentum=0.9)),
    "adamw": lenient(optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3))),
    "adafactor": lenient(optax.adafactor(1e-2, min_dim_size_to_factor=4)),
}


def past_a_nan(made: sk.TrainStep, params: Any, batch: Any, row: int) -> Any:
    """The state after three steps, and one that a NaN in this row of its batch makes a step that changes nothing."""
    state = made.init(params, jax.random.key(0))
    for index in range(3):
        state, metrics = made.step(state, batch(index))
        assert bool(metrics["finite"])
    bad = batch(4)
    bad["x"][row, 0] = np.nan
    before = jax.device_get((state.params, state.opt_state))
    state, metrics = made.step(state, bad)
    assert not bool(metrics["finite"])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((state.params, state.opt_state)), before)
    return state


@cache
def expected(model: ModelRow, optimizer: str, relative: float) -> Reference:
    """The training on one device, run once for all rows of a model."""
    batches = [model.batch(step) for step in range(STEPS)]
    grad_fn = sk.value_and_grad(model.loss(None))
    return one_device(grad_fn, OPTIMIZERS[optimizer], model.params(), batches, key=KEY, relative=relative)


def check(
    row: PlanRow,
    model: ModelRow,
    optimizer: str = "adamw",
    grad_fn: Any = None,
    laws: Any = ONCE,
    reference: Reference | None = None,
    **options: Any,
) -> Proof:
    """Every law on a row of the conformance list, for three steps; `options` are those of `make_train_step`."""
    batches = [model.batch(step) for step in range(STEPS)]
    grad_fn = grad_fn or sk.value_and_grad(model.loss(row.model_axis))
    proved = Row(row.sizes, row.plan(), grad_fn, optimizer=OPTIMIZERS[optimizer], label=row.name, **options)
    wanted = reference or expected(model, optimizer, choose_relative(proved.precision))
    return prove(grad_fn, wanted, rows=[proved], params=model.params(), batches=batches, key=KEY, laws=laws)
