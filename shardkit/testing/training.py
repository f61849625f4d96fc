"""Compares training on a mesh with the same training on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from shardkit._arguments.checks import at_least, mesh_in_context
from shardkit._arguments.typed import Arrays, Key, Optimizer, typed
from shardkit.on_device.gradient import GradFn
from shardkit.plans.plan import Plan
from shardkit.testing._compare import check_batches, check_relative, on
from shardkit.testing.laws import equal_copies, same_numbers
from shardkit.testing.one_device import one_device
from shardkit.testing.program import Program
from shardkit.testing.rows import Row


@typed
def assert_same_training(
    grad_fn: GradFn,
    reference_grad_fn: GradFn,
    optimizer: Optimizer,
    *,
    mesh: Mesh | None = None,
    plan: Plan,
    params: Arrays,
    batches: Sequence[Any],
    key: Key | None = None,
    accumulate: int = 1,
    relative: float = 1e-5,
    steps: int | None = None,
) -> None:
    """Proves a training step: loss, gradients and parameters equal those of one device, step by step.

    Runs `make_train_step(grad_fn, ...)` and, without a mesh, `reference_grad_fn` with the same optimizer for
    `len(batches)` steps. Gradients are compared before the optimizer, because one that clips or normalizes hides a
    wrong factor. The tolerance follows from the effect of gradients perturbed by `relative` on the same run on one
    device (see `one_device`). Replicas of a parameter must be bitwise equal. These are two of the laws
    of `prove`, which checks all laws on several meshes and plans.

    Args:
        grad_fn: what each device computes.
        reference_grad_fn: the same on one device, over the whole batch, with no axis bound.
        optimizer: an optax GradientTransformation.
        mesh: the mesh; by default that of `jax.set_mesh`.
        plan: how its axes are used.
        params: the parameters, a pytree of global arrays.
        batches: one global batch for each step, at least one.
        key: the key of the run, from which both derive one key for each example; by default `jax.random.key(0)`.
        accumulate: microbatches per step on the mesh.
        relative: the error of a gradient, relative to the largest magnitude in the leaf. The default is for float32.
        steps: steps per call, as for `make_train_step`: the batches of a call are stacked. Then all losses are
            compared, and the gradients and parameters of the last step of each call.

    Raises:
        AssertionError: a difference; names mesh, plan, step and leaf, the difference and what is allowed.
        ValueError: no batch, a relative error that is not between 0 and 1, or steps that do not divide the batches.
        TypeError, ValueError: what building or tracing the step raises.

    Example:
        >>> grad_fn = sk.value_and_grad(lambda w, x, keys: sk.Mean.of((x @ w) ** 2))
        >>> sk.testing.assert_same_training(
        ...     grad_fn, grad_fn, optax.sgd(0.1), mesh=mesh, plan=sk.fsdp("data", min_size=1),
        ...     params=np.ones(4, "f"), batches=[np.ones((8, 4), "f")],
        ... )
    """
    mesh = mesh_in_context("assert_same_training", mesh)
    at_least("assert_same_training", 1, accumulate=accumulate, steps=steps)
    check_batches("assert_same_training", batches)
    check_relative("assert_same_training", relative)
    reference = one_device(reference_grad_fn, optimizer, params, batches, key=key, relative=relative)
    key = jax.random.key(0) if key is None else key
    row = Row(dict(mesh.shape), plan, accumulate=accumulate, steps=steps)
    program = Program.of(row, grad_fn, optimizer, params, batches, key, mesh=mesh)
    for law in (same_numbers, equal_copies):
        try:
            law(program, reference)
        except AssertionError as error:
            raise AssertionError(f"assert_same_training: {on(mesh)} with plan {plan}, {error}") from None
