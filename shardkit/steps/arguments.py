"""Checks of the builders' arguments before anything is traced: the mistakes that users make first."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp

from shardkit.meshes.rng import refuse_unstable
from shardkit.on_device.means import describe_type
from shardkit.on_device.pipelines import Staged


def check_function(where: str, function: Any) -> None:
    """Refuses a loss in place of a GradFn, and in `make_eval_step` a GradFn in place of a loss.

    Raises:
        TypeError: the other kind of function, or no function.
    """
    training = where != "make_eval_step"
    if training:
        rule = "grad_fn must be a GradFn"
        remedy = "Pass sk.value_and_grad(loss_fn)."
        method = "value_and_grad"
    else:
        rule = "loss_fn must be a loss function"
        remedy = "Pass loss_fn itself, without value_and_grad."
        method = "loss"
    if isinstance(function, Staged):
        remedy = f"Pass pipe.{method}(embed, stage, head) of pipe = sk.pipeline(...)."
    takes_scale: bool | None = not training  # of what is no function: wrong in both builders
    if callable(function):
        takes_scale = _takes_scale(function)
    if takes_scale is not None and takes_scale != training:
        raise TypeError(f"{where}: {rule}; got {_describe(function)}. {remedy}")


def check_key(key: Any) -> jax.Array:
    """The key of a run as a typed key; refuses several, and implementations whose draws depend on the batch size."""
    is_typed = False
    is_raw = False
    if hasattr(key, "dtype"):
        is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and jnp.ndim(key) == 0
        is_raw = key.dtype == jnp.uint32 and jnp.shape(key) in {(2,), (4,)}
    if not is_typed and not is_raw:
        raise TypeError(f"init: key must be one jax key; got {_describe(key)}. Pass for example jax.random.key(0).")
    if is_raw:
        key = jax.random.wrap_key_data(key)
    refuse_unstable("init", key)
    return key


def _takes_scale(function: Any) -> bool | None:
    """Whether a function takes `scale=`, as a GradFn does; None if its signature does not say."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    for parameter in parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return None
    return "scale" in parameters


def _describe(x: Any) -> str:
    """A value as an error names it."""
    if hasattr(x, "dtype"):
        return describe_type(x)
    if isinstance(x, Staged):
        return f"a {type(x).__name__}"
    name = getattr(x, "__name__", None)
    if callable(x) and name:
        return f"the function {name!r}"
    text = repr(x)
    if len(text) < 60:
        return f"{type(x).__name__} {text}"
    return type(x).__name__
