"""The same training on one device, and how far rounding alone may move another run away from it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardkit._arguments.typed import Arrays, Key, Optimizer, typed
from shardkit._jax.compat import UnboundAxisError
from shardkit.meshes.rng import example_keys, step_key
from shardkit.on_device.gradient import GradFn
from shardkit.on_device.means import Mean, divisor_of, is_mean, largest_weight, terms_of
from shardkit.steps.carry import check_carried, reads_carried
from shardkit.steps.optimizer import wrap_optimizer
from shardkit.steps.state import is_initializer
from shardkit.testing._compare import check_batches, check_conclusive, check_relative, list_leaves, magnitude

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
    carried: Any = None  # the carried state after the step, numpy arrays
    carried_allowed: Any = None  # a number for each leaf


@dataclass(frozen=True, eq=False)
class Training:
    """The arguments of a training on one device, as `one_device` takes them."""

    grad_fn: GradFn
    optimizer: Any
    params: Any
    batches: Sequence[Any]
    key: jax.Array
    carry: Any = None
    carried: Any = None

    def init_carried(self, params: Any) -> Any:
        """The carried state before the first step."""
        carried = self.carried
        if is_initializer(carried):
            carried = carried(params)
        return _fix_dtypes(carried)

    def carried_arguments(self, carried: Any) -> dict[str, Any]:
        """The keyword arguments by which the GradFn gets the carried state; none if it does not read it."""
        if reads_carried(self.grad_fn):
            return {"carried": carried}
        return {}

    def update_carried(self, carried: Any, loss: Any, metrics: Any, params: Any) -> Any:
        """The carried state after a step, in the dtypes that it had."""
        if self.carry is None:
            return carried
        updated = self.carry(carried, {"loss": loss, **metrics}, params)
        return jax.tree.map(lambda x, old: jnp.asarray(x, old.dtype), updated, carried)


class Reference(NamedTuple):
    """A training run on one device: the expected results of each step, and its arguments."""

    steps: tuple[Wanted, ...]
    training: Training | None = None


class _Step(NamedTuple):
    loss: Any
    metrics: dict[str, Any]
    grads: Any
    params: Any
    carried: Any


@typed
def one_device(
    grad_fn: GradFn,
    optimizer: Optimizer,
    params: Arrays,
    batches: Sequence[Any],
    *,
    key: Key | None = None,
    relative: float = _RELATIVE,
    carry: Callable[[Any, Any, Any], Any] | None = None,
    carried: Any = None,
) -> Reference:
    """Trains on one device with plain jax and optax, and computes how far other runs may differ.

    Another order of summation changes a gradient by about `relative` times the largest magnitude in the leaf, or 1e-6
    of the largest gradient if the leaf's own is only rounding noise. The effect on the loss, the later gradients and
    the parameters depends on model and optimizer: Adam moves a parameter with a gradient near zero by the whole
    learning rate, in the direction of the noise. The run is therefore repeated twice with gradients perturbed by this
    much in every element, once in a random direction and once in the opposite one, and twice the distance between the
    runs is allowed too. If the gradient of a leaf is only noise, each element may differ by the norm of this distance
    over the leaf: an optimizer that scales updates to a norm, as lamb does, may put it all into one element.

    Args:
        grad_fn: the computation over the whole batch, with no axis bound; from `value_and_grad(loss_fn)`.
        optimizer: an optax GradientTransformation. It gets `value=loss` if it takes a value.
        params: pytree of arrays.
        batches: one global batch for each step, at least one.
        key: the key of the run; by default `jax.random.key(0)`.
        relative: the error of a gradient, relative to the largest magnitude in the leaf. The default is for float32.
        carry: as for `make_train_step`.
        carried: as for its `init`, the first carried state or a function of the parameters.

    Returns:
        Reference: loss, metrics, gradients and parameters of each step, and the allowed differences.

    Raises:
        ValueError: carried state that is missing or unused, no batch, a relative error that is not between 0 and 1, or
            a run that proves nothing: a loss or gradient is not finite, or all gradients of a step are zero.

    Example:
        >>> grad_fn = sk.value_and_grad(lambda w, x, keys: sk.Mean.of((x @ w) ** 2))
        >>> reference = sk.testing.one_device(grad_fn, optax.sgd(0.1), np.ones(3, "f"), [np.ones((8, 3), "f")] * 2)
        >>> float(reference.steps[0].loss)
        9.0
    """
    check_carried("one_device", reads_carried(grad_fn), carry, carried, "carried=, and carry= if it changes")
    check_batches("one_device", batches)
    check_relative("one_device", relative)
    if key is None:
        key = jax.random.key(0)
    training = Training(grad_fn, optimizer, params, tuple(batches), key, carry, carried)
    try:
        exact_run = _run(training, relative, sign=0)
    except (UnboundAxisError, NameError) as error:
        # Python's own is of a variable: NameError has its name, UnboundLocalError has none. jax raises NameError of an
        # axis, without a name.
        if isinstance(error, UnboundLocalError) or getattr(error, "name", None):
            raise
        raise ValueError(
            f"one_device: the loss must run on one device, where no axis is bound; {error} Pass a gradient function of "
            "a loss without collectives, over the whole batch."
        ) from error
    for index, step in enumerate(exact_run):
        check_conclusive(f"one_device: step {index}", step.grads, step.loss)
    run_up = _run(training, relative, sign=1)
    run_down = _run(training, relative, sign=-1)

    def remains_noise(was_noise: bool, x: Any, error: float) -> bool:
        # The optimizer state carries the noise of a step into later steps: an element that was noise once remains
        # noise.
        return was_noise or magnitude(x) <= error

    is_noise: Any = jax.tree.map(lambda x: False, exact_run[0].grads)
    expected = []
    for step, step_up, step_down in zip(exact_run, run_up, run_down, strict=True):
        errors = estimate_noise(step.grads, relative)
        is_noise = jax.tree.map(remains_noise, is_noise, step.grads, errors)
        expected.append(_allow_differences(step, step_up, step_down, relative=relative, is_noise=is_noise))
    return Reference(tuple(expected), training)


def _fix_dtypes(tree: Any) -> Any:
    """The leaves as jax's arrays, of the dtypes that jax gives them; none is weakly typed, as a Python number is."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), tree)


def _allow_differences(step: _Step, *perturbed: _Step, relative: float, is_noise: Any) -> Wanted:
    """The results of a step, with the differences that rounding and the perturbed runs allow.

    Worked example, a gradient leaf [4.0, -0.1] with relative=1e-5. Another order of summation may change each element
    by 1e-5 of the largest one, 4e-5. In the perturbed runs the leaf is [4.00004, -0.09996] and [3.99996, -0.10004]:
    twice the largest distance is 8e-5. Each element may therefore differ by 1.2e-4.
    """

    def double_distance(x: Any, *perturbed_xs: Any) -> Any:
        distances = [np.abs(_widen(perturbed_x) - _widen(x)) for perturbed_x in perturbed_xs]
        return 2 * np.max(distances, axis=0)

    # Twice the largest distance to the perturbed runs, for each element of each result.
    spreads = jax.tree.map(double_distance, step, *perturbed)

    def allow_gradient(error: float, spread: Any) -> float:
        return error + _find_largest(spread)

    def allow_parameter(x: Any, spread: Any, all_noise: bool) -> Any:
        if all_noise:  # an optimizer may put the whole distance into one element
            spread = np.full_like(spread, np.linalg.norm(spread))
        return relative * magnitude(x) + spread

    # A mean may be far smaller than the terms of its sum; only the loss tells how large they are.
    least = 0.1 * relative * abs(float(step.loss))

    def allow_metric(x: Any, spread: Any) -> float:
        return max(relative * magnitude(x), least) + _find_largest(spread)

    def allow_carried(x: Any, spread: Any) -> float:
        return relative * magnitude(x) + _find_largest(spread)

    loss_allowed = float(spreads.loss) + relative * abs(float(step.loss))
    errors = estimate_noise(step.grads, relative)
    grads_allowed = jax.tree.map(allow_gradient, errors, spreads.grads)
    params_allowed = jax.tree.map(allow_parameter, step.params, spreads.params, is_noise)
    metrics_allowed = jax.tree.map(allow_metric, step.metrics, spreads.metrics)
    carried_allowed = jax.tree.map(allow_carried, step.carried, spreads.carried)
    return Wanted(
        loss=step.loss,
        metrics=step.metrics,
        grads=step.grads,
        params=step.params,
        carried=step.carried,
        loss_allowed=loss_allowed,
        metrics_allowed=metrics_allowed,
        grads_allowed=grads_allowed,
        params_allowed=params_allowed,
        carried_allowed=carried_allowed,
    )


def _find_largest(x: Any) -> float:
    """The largest element; 0 if there is none."""
    return float(np.max(x, initial=0.0))


def estimate_noise(grads: Any, relative: float) -> Any:
    """The error that another order of summation may cause in each gradient leaf, a number."""
    overall = 0.0
    for _, x in list_leaves(grads):
        overall = max(overall, magnitude(x))

    def estimate(x: Any) -> float:
        return max(relative * magnitude(x), ZERO * overall)

    return jax.tree.map(estimate, grads)


def _run(training: Training, relative: float, sign: int) -> list[_Step]:
    """All steps on one device, with gradients perturbed in the direction of `sign`; 0 leaves them as they are."""
    grad_fn: Any = training.grad_fn
    compute_gradient = make_gradient(grad_fn)
    update = make_update(training.optimizer)
    params = _fix_dtypes(training.params)
    opt_state = wrap_optimizer(training.optimizer).init(params)
    carried = training.init_carried(params)
    steps = []
    for index, batch in enumerate(training.batches):
        # Scalars in a batch have no examples to count.
        arrays = [x for x in jax.tree.leaves(batch) if np.ndim(x)]
        keys = example_keys(step_key(training.key, index), len(arrays[0]))
        results = compute_gradient(params, batch, keys, **training.carried_arguments(carried))
        loss, metrics, grads = jax.device_get(results)
        if sign:
            grads = _perturb(grads, relative, sign)
        params, opt_state = update(grads, opt_state, params, loss)
        carried = training.update_carried(carried, loss, metrics, params)
        host_params, host_carried = jax.device_get((params, carried))
        steps.append(_Step(loss, metrics, grads, host_params, host_carried))
    return steps


@lru_cache(maxsize=32)
def make_gradient(grad_fn: Any) -> Callable[..., Any]:
    """`(params, batch, keys, **carried) -> (loss, metrics, grads)` of a GradFn, compiled.

    A GradFn returns sums: the total loss with its weight, and gradients of the total. For example, of 8 examples with
    the loss 2 each it returns Mean(16, 8), and the gradients of 16. Here both are divided by the weight: the loss is 2.
    """

    @jax.jit
    def compute_gradient(params: Any, batch: Any, keys: jax.Array, **carried: Any) -> Any:
        loss, aux, grads = grad_fn(params, batch, keys, **carried)
        weight = divisor_of(jnp.asarray(largest_weight(loss), jnp.float32))
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / weight, grads)
        means = jax.tree.map(lambda mean: _divide(mean, jnp.float32), dict(aux), is_leaf=is_mean)
        # A loss may be a sum of several means, as of a task and of a router: each is divided by its own weight.
        total: Any = 0
        for mean in terms_of(loss):
            total += _divide(mean, mean.total.dtype)
        return total, {"weight": weight, **means}, grads

    return compute_gradient


def _divide(mean: Mean, dtype: Any) -> jax.Array:
    return jnp.asarray(mean.total, dtype) / divisor_of(jnp.asarray(mean.weight, dtype))


@lru_cache(maxsize=32)
def make_update(optimizer: Any) -> Callable[..., Any]:
    """`(grads, opt_state, params, loss) -> (params, opt_state)` of an optimizer, compiled."""
    import optax

    extended = wrap_optimizer(optimizer)

    @jax.jit
    def update(grads: Any, opt_state: Any, params: Any, loss: Any) -> Any:
        updates, opt_state = extended.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    return update


def _perturb(grads: Any, relative: float, sign: int) -> Any:
    """The gradients with every element perturbed by the allowed error, in random directions times `sign`."""
    # Seeded anew in each step, so that the runs of both signs go along the same directions.
    rng = np.random.default_rng(zlib.crc32(b"rounding"))

    def perturb_leaf(x: np.ndarray, error: float) -> np.ndarray:
        directions = rng.choice([-1.0, 1.0], size=x.shape)
        return (x + sign * error * directions).astype(x.dtype)

    return jax.tree.map(perturb_leaf, grads, estimate_noise(grads, relative))


def _widen(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)
