"""The same training on one device, and how far rounding alone may move another run away from it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardkit._arguments.typed import Arrays, Key, Optimizer, typed
from shardkit.meshes.rng import example_keys, step_key
from shardkit.on_device.gradient import GradFn, Mean, divisor_of, is_mean, largest_weight, terms_of
from shardkit.steps.carry import reads_carried
from shardkit.steps.state import passed_what_it_takes
from shardkit.testing._compare import check_batches, check_relative, check_telling, leaves_of, magnitude

# A gradient leaf smaller than the largest by this factor is rounding noise: its true value is zero.
ZERO = 1e-6
_RELATIVE = 1e-5


class Wanted(NamedTuple):
    """The results of one step on one device, and by how much another run may differ."""

    loss: np.ndarray  # scalar
    metrics: dict[str, np.ndarray]  # "weight", the divisor of the loss, and the auxiliary means by name
    grads: Any  # gradients of the mean loss, numpy arrays
    params: Any  # the parameters after the step, numpy arrays
    loss_allowed: float  # number
    metrics_allowed: dict[str, Any]  # a number for each array of `metrics`
    grads_allowed: Any  # a number for each leaf
    params_allowed: Any  # an array for each leaf, element by element


@dataclass(frozen=True, eq=False)
class Training:
    """What a training on one device is of, as `one_device` takes it."""

    grad_fn: GradFn
    optimizer: Any
    params: Any
    batches: Sequence[Any]
    key: jax.Array


class Reference(NamedTuple):
    """A training run on one device: the expected results of each step, and what they are of."""

    steps: tuple[Wanted, ...]
    given: Training | None = None


class _Step(NamedTuple):
    loss: Any
    metrics: dict[str, Any]
    grads: Any
    params: Any


@typed
def one_device(
    grad_fn: GradFn,
    optimizer: Optimizer,
    params: Arrays,
    batches: Sequence[Any],
    *,
    key: Key | None = None,
    relative: float = _RELATIVE,
) -> Reference:
    """Trains on one device with plain jax and optax, and derives by how much other runs may differ.

    Another order of summation changes a gradient by about `relative` times the largest magnitude in the leaf, or 1e-6
    of the largest gradient if the leaf's own is only rounding noise. The effect on the loss, the later gradients and
    the parameters depends on model and optimizer: Adam moves a parameter whose gradient is nearly zero by the whole
    learning rate, in the direction of the noise. The run is therefore repeated twice with gradients perturbed by this
    much in every element, once in a random direction and once in the opposite one, and twice the distance between the
    runs is allowed too. In a leaf whose gradient is only noise, each element may differ by the norm of that distance
    over the leaf, because an optimizer that scales updates to a norm, as lamb does, may put it all into one element.

    Args:
        grad_fn: what one device computes over the whole batch, with no axis bound; from `value_and_grad(loss_fn)`.
        optimizer: an optax GradientTransformation; it gets `value=loss` if it takes that.
        params: pytree of arrays.
        batches: one global batch for each step, at least one.
        key: the key of the run; by default `jax.random.key(0)`.
        relative: the error of a gradient, relative to the largest magnitude in the leaf. The default is for float32.

    Returns:
        Reference: loss, metrics, gradients and parameters of each step, and the allowed differences.

    Raises:
        TypeError: a loss that takes carried state.
        ValueError: no batch, a relative error that is not between 0 and 1, or a run that proves nothing: its loss or a
            gradient is not finite, or all gradients of a step are zero.

    Example:
        >>> grad_fn = sk.value_and_grad(lambda w, x, keys: sk.Mean.of((x @ w) ** 2))
        >>> reference = sk.testing.one_device(grad_fn, optax.sgd(0.1), np.ones(3, "f"), [np.ones((8, 3), "f")] * 2)
        >>> float(reference.steps[0].loss)
        9.0
    """
    if reads_carried(grad_fn):
        raise TypeError(
            "one_device: a proof keeps no carried state, which the loss takes. Pass functools.partial(grad_fn, "
            "carried=...) with a fixed one."
        )
    check_batches("one_device", batches)
    check_relative("one_device", relative)
    key = jax.random.key(0) if key is None else key
    run = partial(_run, grad_fn, optimizer, params, batches, key, relative)
    for index, step in enumerate(plain := run(0)):
        check_telling(f"one_device: step {index}", step.grads, step.loss)
    noise: Any = jax.tree.map(lambda x: False, plain[0].grads)
    wanted = []
    for steps in zip(plain, run(1), run(-1), strict=True):
        # The optimizer state carries noise of one step into the later ones.
        noise = jax.tree.map(
            lambda was, x, error: was or magnitude(x) <= error,
            noise,
            steps[0].grads,
            noise_of(steps[0].grads, relative),
        )
        wanted.append(_wanted(*steps, relative=relative, noise=noise))
    return Reference(tuple(wanted), Training(grad_fn, optimizer, params, tuple(batches), key))


def _wanted(plain: _Step, *noisy: _Step, relative: float, noise: Any) -> Wanted:
    def spread(pick: Callable[[_Step], Any]) -> Any:
        others = [pick(step) for step in noisy]
        return jax.tree.map(
            lambda x, *ys: 2 * np.max([np.abs(_wide(y) - _wide(x)) for y in ys], axis=0), pick(plain), *others
        )

    loss = float(spread(lambda step: step.loss)) + relative * abs(float(plain.loss))
    grads = jax.tree.map(
        lambda error, gap: error + float(np.max(gap, initial=0.0)),
        noise_of(plain.grads, relative),
        spread(lambda step: step.grads),
    )
    params = jax.tree.map(
        lambda x, gap, all_noise: (
            relative * magnitude(x) + (np.full_like(gap, np.linalg.norm(gap)) if all_noise else gap)
        ),
        plain.params,
        spread(lambda step: step.params),
        noise,
    )
    # A mean may be far smaller than what it sums; how large that is, only the loss tells.
    least = 0.1 * relative * abs(float(plain.loss))
    metrics = jax.tree.map(
        lambda x, gap: max(relative * magnitude(x), least) + float(np.max(gap, initial=0.0)),
        plain.metrics,
        spread(lambda step: step.metrics),
    )
    return Wanted(plain.loss, plain.metrics, plain.grads, plain.params, loss, metrics, grads, params)


def noise_of(grads: Any, relative: float) -> Any:
    """The error that another order of summation may cause in each gradient leaf, a number."""
    overall = max((magnitude(x) for _, x in leaves_of(grads)), default=0.0)
    return jax.tree.map(lambda x: max(relative * magnitude(x), ZERO * overall), grads)


def _run(
    grad_fn: GradFn, optimizer: Any, params: Any, batches: Sequence[Any], key: jax.Array, relative: float, sign: int
) -> list[_Step]:
    loss_and_gradient: Any = grad_fn
    gradient, update = gradient_of(loss_and_gradient), update_of(optimizer)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), params)
    opt_state, steps = passed_what_it_takes(optimizer).init(params), []
    for index, batch in enumerate(batches):
        rows = next(np.shape(x)[0] for x in jax.tree.leaves(batch) if np.ndim(x))
        keys = example_keys(step_key(key, index), rows)
        loss, metrics, grads = jax.device_get(gradient(params, batch, keys))
        if sign:
            grads = _off(grads, relative, sign)
        params, opt_state = update(grads, opt_state, params, loss)
        steps.append(_Step(loss, metrics, grads, jax.device_get(params)))
    return steps


@lru_cache(maxsize=32)
def gradient_of(grad_fn: Any) -> Callable[..., Any]:
    """Loss, metrics and gradients of the mean, compiled once per function."""

    @jax.jit
    def gradient(params: Any, batch: Any, keys: jax.Array) -> Any:
        loss, aux, grads = grad_fn(params, batch, keys)
        weight = divisor_of(jnp.asarray(largest_weight(loss), jnp.float32))
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / weight, grads)
        means = jax.tree.map(lambda mean: _ratio(mean, jnp.float32), dict(aux), is_leaf=is_mean)
        total = sum(_ratio(mean, mean.total.dtype) for mean in terms_of(loss))
        return total, {"weight": weight, **means}, grads

    return gradient


def _ratio(mean: Mean, dtype: Any) -> jax.Array:
    return mean.total / divisor_of(jnp.asarray(mean.weight, dtype))


@lru_cache(maxsize=32)
def update_of(optimizer: Any) -> Callable[..., Any]:
    """`(grads, opt_state, params, loss) -> (params, opt_state)` of an optimizer, compiled."""
    import optax

    extended = passed_what_it_takes(optimizer)

    @jax.jit
    def update(grads: Any, opt_state: Any, params: Any, loss: Any) -> Any:
        updates, opt_state = extended.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    return update


def _off(grads: Any, relative: float, sign: int) -> Any:
    """The gradients with every element perturbed by the allowed error, in random directions times `sign`."""
    rng = np.random.default_rng(zlib.crc32(b"rounding"))

    def one(x: np.ndarray, error: float) -> np.ndarray:
        return (x + sign * error * rng.choice([-1.0, 1.0], size=x.shape)).astype(x.dtype)

    return jax.tree.map(one, grads, noise_of(grads, relative))


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)
