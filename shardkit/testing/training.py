"""A training step on a mesh against the same steps on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from shardkit.parallel import GradFn, Plan, unpadded
from shardkit.rng import example_keys
from shardkit.testing._compare import first_gap, leaves_of, magnitude, on, shapes_differ
from shardkit.train import make_train_step, step_key

# A gradient leaf this much smaller than the largest one is rounding noise: its true value is zero.
ZERO = 1e-6


class Recorded(NamedTuple):
    """The state of a recording optimizer: that of the optimizer itself, and the gradients it was last given."""

    inner: Any
    grads: Any


def recording(optimizer: Any) -> Any:
    """Wraps an optimizer so that its state also holds the gradients of the last step.

    A clipped or adaptive optimizer hides a wrong factor in the gradients; this shows them.

    Args:
        optimizer: an optax GradientTransformation.

    Returns:
        A GradientTransformation with the same updates, whose state is `Recorded(inner, grads)`; grads is laid out as
        the plan's update.
    """
    import optax

    optimizer = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> Recorded:
        return Recorded(optimizer.init(params), jax.tree.map(jnp.zeros_like, params))

    def update(grads: Any, state: Recorded, params: Any = None, **extra: Any) -> tuple[Any, Recorded]:
        updates, inner = optimizer.update(grads, state.inner, params, **extra)
        return updates, Recorded(inner, grads)

    return optax.GradientTransformationExtraArgs(init, update)


def assert_same_training(
    grad_fn: GradFn,
    reference_grad_fn: GradFn,
    optimizer: Any,
    *,
    mesh: Mesh,
    plan: Plan,
    params: Any,
    batches: Sequence[Any],
    key: jax.Array | None = None,
    accumulate: int = 1,
    relative: float = 1e-5,
) -> None:
    """Proves a training step: the same loss, gradients and parameters as on one device, step by step.

    Runs `make_train_step(grad_fn, ...)` and, without a mesh, `reference_grad_fn` with the same optimizer for
    `len(batches)` steps. The gradients are compared themselves, through a recording optimizer, because an optimizer
    that clips or normalises hides a wrong factor. What is allowed in a leaf is `relative` times its largest magnitude.
    A leaf whose reference gradient is below 1e-6 of the largest gradient in every step is zero but for rounding, and is
    compared absolutely: its gradient within 1e-6 of the largest gradient, its value within the largest steps that any
    parameter has made, summed (Adam moves it by noise). Copies of a parameter on several devices must agree in every
    bit.

    Args:
        grad_fn: what each device computes.
        reference_grad_fn: the same on one device, over the whole batch, with no axis bound.
        optimizer: an optax GradientTransformation.
        mesh: the mesh.
        plan: how its axes are used.
        params: the parameters, a pytree of global arrays.
        batches: one global batch for each step, at least one.
        key: the key of the run, from which both derive one key for each example; by default `jax.random.key(0)`.
        accumulate: microbatches a step on the mesh.
        relative: the largest difference, relative to the largest magnitude in the leaf. The default is for float32.

    Raises:
        AssertionError: a difference; names mesh, plan, step, leaf, how far it is off and what is allowed.
        ValueError: no batch.
        TypeError, ValueError: what building or tracing the step raises.
    """
    import optax

    if not batches:
        raise ValueError("assert_same_training: at least one batch is needed; got none. Pass one for each step.")
    key = jax.random.key(0) if key is None else key
    recorder = recording(optimizer)
    init, step = make_train_step(grad_fn, recorder, mesh=mesh, plan=plan, accumulate=accumulate)
    optimizer = optax.with_extra_args_support(optimizer)

    @jax.jit
    def one_device(params: Any, opt_state: Any, batch: Any, keys: jax.Array) -> Any:
        (total, weight), _, grads = reference_grad_fn(params, batch, keys)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / jnp.asarray(weight, jnp.float32), grads)
        loss = total / jnp.asarray(weight, total.dtype)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, loss, grads

    state, opt_state, moved = init(params, key), optimizer.init(params), 0.0
    zero = {path for path, _ in leaves_of(params)}
    for index, batch in enumerate(batches):
        where = f"assert_same_training: {on(mesh)} with plan {plan}, step {index}"
        rows = next(np.shape(x)[0] for x in jax.tree.leaves(batch) if np.ndim(x))
        keys = example_keys(step_key(key, index), rows)
        old = params
        params, opt_state, loss, grads = one_device(params, opt_state, batch, keys)
        state, metrics = step(state, batch)
        overall = max(magnitude(g) for _, g in leaves_of(grads))
        zero -= {path for path, g in leaves_of(grads) if magnitude(g) > ZERO * overall}
        moved += max(magnitude(y - x) for (_, x), (_, y) in zip(leaves_of(old), leaves_of(params), strict=True))
        _compare(where, "the loss", metrics["loss"], loss, relative, set(), 0.0)
        _compare(where, "the gradient of", state.opt_state.grads, grads, relative, zero, ZERO * overall)
        _compare(where, "the updated parameter", state.params, params, relative, zero, moved)
        _assert_copies_agree(where, state.params)


def _compare(where: str, what: str, got: Any, wanted: Any, relative: float, zero: set[str], absolute: float) -> None:
    got = unpadded(got)
    wrong = shapes_differ(got, wanted)
    if wrong:
        raise AssertionError(
            f"{where}: {what} must be of the same tree and shapes as on one device; {wrong}. Return the gradient of "
            "every parameter as it was seen."
        )
    for (path, x), (_, y) in zip(leaves_of(got), leaves_of(wanted), strict=True):
        bound = absolute if path in zero else relative * magnitude(y)
        gap = first_gap(x, y, lambda leaf, overall, bound=bound: bound)  # type: ignore[misc]
        if gap:
            name = "" if path == "(the whole tree)" else f" {path}"
            text = str(gap).replace("the reference", "one device's")
            raise AssertionError(
                f"{where}: {what}{name} must be as on one device; {text}. Look at what the loss sums and over which "
                "axes it varies."
            )


def _assert_copies_agree(where: str, tree: Any) -> None:
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        pieces: dict[str, Any] = {}
        for shard in x.addressable_shards:
            bits = np.asarray(shard.data).tobytes()
            first = pieces.setdefault(str(shard.index), (shard.device, bits))
            if first[1] != bits:
                name = jax.tree_util.keystr(path, simple=True, separator=".")
                raise AssertionError(
                    f"{where}: the copies of parameter {name} must be equal in every bit; those on devices "
                    f"{first[0].id} and {shard.device.id} differ. Look for randomness, or a reduction that one of them "
                    "leaves out."
                )
