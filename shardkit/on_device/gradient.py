"""The GradFn of a loss: what one device computes of its examples, the loss as a Mean and the gradients of its total.

`means.py` has the Means, `loss_results.py` reads what the loss returned, `mean_sums.py` sums over devices.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from shardkit._arguments.typed import typed
from shardkit.collectives.axes import vary_like
from shardkit.on_device.handles import call_sealed, open_before_loss, replace_parts, strip_handles
from shardkit.on_device.loss_results import loss_and_aux, refuse_rounded_totals
from shardkit.on_device.mean_sums import combine_terms
from shardkit.on_device.means import Mean, Sum
from shardkit.on_device.one_device import call_on_one_device, note_type_errors
from shardkit.on_device.trained import TrainedLeaves, check_trained

Gradients = tuple[Any, Mapping[str, Any], Any]  # the loss, the auxiliary means by name, the gradients


class GradFn(Protocol):
    """The computation of one device inside shard_map: `value_and_grad(loss_fn)` makes one.

    It returns partial sums: the loss as a Mean, auxiliary means by name, and the gradients of `scale * total` with
    respect to its parameters.
    """

    def __call__(
        self, params: Any, batch: Any, keys: jax.Array, *, scale: Any = 1
    ) -> tuple[Mean, Mapping[str, Any], Any]: ...


LossFn = Callable[..., Any]
# The leaves that are trained -> the total, and beside it the loss and the auxiliary means.
Objective = Callable[[list[jax.Array]], tuple[jax.Array, tuple[Any, Mapping[str, Any]]]]
# Where the arguments of a loss stand in the message of an error: carried state, the fourth, is called so.
_ARGUMENTS = ("", "", "", "carried")


class WithCarried(partial):
    """A GradFn with the carried state that it takes."""


@typed
def value_and_grad(loss_fn: LossFn, *, trained: Any = None, local: bool = False) -> GradFn:
    """Turns a loss function of any pytree model into the function each device runs in a step.

    Args:
        loss_fn: your `loss_fn(params, batch, keys)`. It gets this device's examples, and one key for each of them (None
            in evaluation). Return a scalar (a mean over equally many examples on every device) or a `Mean(total,
            weight)`. You may add a dict of auxiliary scalars or Means, which may be nested: `(loss, aux)`. If it has a
            fourth positional parameter without default, `loss_fn(params, batch, keys, carried)`, it also gets the
            carried state, which is not differentiated.
        trained: a tree of bools like the parameters, or a prefix of it; False freezes a leaf. The gradient of a frozen
            leaf is zero; it is neither computed nor sent, and algorithms with `feedback=True` refuse it. The step keeps
            a frozen leaf unchanged, also from weight decay. The optimizer needs no state for it: you may pass
            `optax.masked(optimizer, trained)`. None trains all leaves.
        local: whether jax traces the loss as on one device, without the mesh. Loops inside libraries such as diffrax
            then need no casts, and the gradient of a constant inside the loss is this device's. Use it for a loss that
            does not communicate, under plans that pass it whole leaves and whole examples.

    Returns:
        A GradFn: `(params, batch, keys, *, scale=1) -> (Mean, aux, gradients of scale * total)`; it takes `carried=` if
        the loss does.

    Raises:
        TypeError: a loss with other arguments, or a `trained` other than a tree of bools. At trace time: the loss is
            neither a real scalar nor a Mean, a total that sums has 16 bits, a weight is not float32 or integer,
            or the weight of the loss depends on the parameters.
        ValueError: a `trained` without any True. At trace time: a `trained` that is not a prefix of the parameters;
            with `local`, a loss that communicates or is a sum of means, lazy leaves, tp, cp, ep.

    Cost: the collectives in `loss_fn`. With `local` jax traces it as often as without, and lowers it as a separate
        function.

    Example:
        >>> loss_fn = lambda params, batch, keys: sk.Mean.of((batch @ params) ** 2)
        >>> loss, aux, grads = sk.value_and_grad(loss_fn)(jnp.ones(2), jnp.ones((3, 2)), None)
        >>> print(loss.total, loss.weight, grads)
        12.0 3.0 [12. 12.]
    """

    check_trained(trained)
    _check_loss(loss_fn)

    # `grad_fn`, which a train step calls, differentiates `objective`, which calls the loss. Nothing stands between
    # them: each function would be a frame in the traceback of every error of a loss.
    def grad_fn(params: Any, batch: Any, keys: Any, *state: Any, scale: Any = 1) -> Gradients:
        args = (batch, keys, *state)
        if is_loss_alone():
            return compute_loss_alone(params, *args)
        if local:
            return differentiate_apart(call_on_one_device, params, scale, *args)
        # A loop inside a library that does not know the mesh may fail only because of the types of axes. The error then
        # gets a note that names local=True.
        with note_type_errors(lambda caller: differentiate_apart(caller, params, scale, *args)):
            # As `differentiate`, without its frame.
            leaves, objective = make_objective(params, *args)
            total, backward, (loss, aux) = jax.vjp(objective, leaves.select(), has_aux=True)
            (grads,) = backward(cotangent_of(total, scale))
            return loss, aux, leaves.with_zeros(grads)

    def make_objective(params: Any, *args: Any) -> tuple[TrainedLeaves, Objective]:
        """The leaves that are trained, and the total as a function of these."""
        leaves = TrainedLeaves(strip_handles(params), trained)
        # Of these only carried state may have lazy leaves. It is not differentiated, so they can be opened here.
        args = tuple(open_before_loss(arg) for arg in args)

        def objective(values: list[jax.Array]) -> tuple[jax.Array, tuple[Any, Mapping[str, Any]]]:
            # Leaves that are opened just before the loss are opened here, inside the differentiated function, so that
            # their gradient is scattered as soon as it exists. Leaves that the loss opens stay handles.
            weights = replace_parts(params, leaves.merge(values))
            # As `call_loss`, without its frame.
            out = call_sealed(loss_fn, weights, *args, at=_ARGUMENTS)
            refuse_rounded_totals(out)
            loss, aux = loss_and_aux(out, allow_sum=True)
            return total_of(loss), (loss, aux)

        return leaves, objective

    def differentiate(params: Any, scale: Any, *args: Any) -> Gradients:
        """The loss, the auxiliary means, and the gradients of `scale` times the total."""
        leaves, objective = make_objective(params, *args)
        total, backward, (loss, aux) = jax.vjp(objective, leaves.select(), has_aux=True)
        (grads,) = backward(cotangent_of(total, scale))
        return loss, aux, leaves.with_zeros(grads)

    def differentiate_apart(call: Callable[..., Any], params: Any, scale: Any, *args: Any) -> Gradients:
        """`differentiate`, traced by `call` as a program of its own, in which nothing can be sent."""
        leaves = TrainedLeaves(strip_handles(params), trained)
        args = tuple(open_before_loss(arg) for arg in args)

        # Leaves that are opened just before the loss must be gathered before that program, and their gradients
        # scattered after it. So the derivative is taken in two parts: of `open_weights` here, and of the loss inside
        # `call`.
        def open_weights(values: list[jax.Array]) -> tuple[list[jax.Array], Any]:
            weights = replace_parts(params, leaves.merge(values))
            return leaves.select(strip_handles(weights)), weights

        _, backward, weights = jax.vjp(open_weights, leaves.select(), has_aux=True)
        loss, aux, grads = call(differentiate, weights, scale, *args)
        (grads,) = backward(leaves.select(grads))
        return loss, aux, leaves.with_zeros(grads)

    def compute_loss_alone(params: Any, *args: Any) -> Gradients:
        """The loss and the auxiliary means, with zeros in place of the gradients."""
        opened = [open_before_loss(tree) for tree in (params, *args)]
        if local:
            out = call_on_one_device(partial(call_loss, loss_fn), *opened)
        else:
            out = call_loss(loss_fn, *opened)
        loss, aux = loss_and_aux(out, allow_sum=True)
        return loss, aux, jax.tree.map(jnp.zeros_like, strip_handles(params))

    def total_of(loss: Any) -> jax.Array:
        """The scalar of a loss that is differentiated: the total of its Mean, or `combine_terms` of a sum of means."""
        if not isinstance(loss, Sum):
            return loss.total
        if local:
            raise ValueError(
                "value_and_grad: with local=True a loss does not communicate, and a sum of means sums its weights over "
                "devices; got both. Leave out local=, or weight the values of one Mean."
            )
        return combine_terms(loss.terms)

    def grad_fn_with_carried(params: Any, batch: Any, keys: Any, *, scale: Any = 1, carried: Any) -> Gradients:
        return grad_fn(params, batch, keys, carried, scale=scale)

    if takes_carried(loss_fn):
        return grad_fn_with_carried  # type: ignore[return-value]
    return grad_fn


def call_loss(loss_fn: LossFn, *args: Any) -> Any:
    """Calls `loss_fn(params, batch, keys)`, or with carried state too, with its lazy leaves sealed.

    An error names a lazy leaf of the carried state by its path there, after "carried".
    """
    out = call_sealed(loss_fn, *args, at=_ARGUMENTS)
    refuse_rounded_totals(out)
    return out


def cotangent_of(total: jax.Array, scale: Any) -> jax.Array:
    """The cotangent of the total: `scale`. Differentiating `scale * total` instead might overflow in float16."""
    return vary_like(jnp.asarray(scale, total.dtype), total)


# Whether GradFns of `value_and_grad` leave out the gradients, for callers that need only the loss.
_LOSS_ALONE: ContextVar[bool] = ContextVar("loss alone", default=False)


@contextmanager
def loss_alone() -> Iterator[None]:
    """A context in which a GradFn of `value_and_grad`, while it is traced, returns zeros in place of the gradients."""
    token = _LOSS_ALONE.set(True)
    try:
        yield
    finally:
        _LOSS_ALONE.reset(token)


def is_loss_alone() -> bool:
    """Whether a GradFn that is traced here may leave out the gradients."""
    return _LOSS_ALONE.get()


def _check_loss(loss_fn: LossFn) -> None:
    """Refuses a loss that cannot be called with parameters, batch and keys, nor with carried state too."""
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):
        return
    if not _can_bind(signature, 3) and not _can_bind(signature, 4):
        raise TypeError(
            "value_and_grad: loss_fn must take (params, batch, keys), or (params, batch, keys, carried); got "
            f"{signature}. Add the arguments that are missing: keys has one key per example, and may go unused."
        )


def _can_bind(signature: inspect.Signature, count: int) -> bool:
    """Whether a function can be called with so many positional arguments."""
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def takes_carried(loss_fn: LossFn) -> bool:
    """Whether a loss takes carried state: as its fourth positional parameter, without a default."""
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = []
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            positional.append(parameter)
    return len(positional) > 3 and positional[3].default is inspect.Parameter.empty
