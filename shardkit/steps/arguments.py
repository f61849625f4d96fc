"""Checks of the builders' arguments before anything is traced: the mistakes that users make first."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp

from shardkit.meshes.rng import refuse_unstable
from shardkit.on_device.means import kind
from shardkit.on_device.pipelines import Staged


def check_function(where: str, function: Any) -> None:
    """Refuses a loss in place of a GradFn, and in `make_eval_step` a GradFn in place of a loss.

    Raises:
        TypeError: the other kind of function, or no function.
    """
    training = where != "make_eval_step"
    what, remedy = (
        ("grad_fn must be a GradFn", "Pass sk.value_and_grad(loss_fn).")
        if training
        else ("loss_fn must be a loss function", "Pass loss_fn itself, without value_and_grad.")
    )
    if isinstance(function, Staged):
        remedy = f"Pass pipe.{'value_and_grad' if training else 'loss'}(embed, stage, head) of pipe = sk.pipeline(...)."
    scaled = _takes_scale(function) if callable(function) else not training
    if scaled is not None and scaled != training:
        raise TypeError(f"{where}: {what}; got {_told(function)}. {remedy}")


def checked_key(key: Any) -> jax.Array:
    """The key of a run as a typed key; refuses several, and implementations whose draws depend on the batch size."""
    typed = hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    raw = hasattr(key, "dtype") and key.dtype == jnp.uint32 and jnp.shape(key) in {(2,), (4,)}
    if (not typed and not raw) or (typed and jnp.ndim(key)):
        raise TypeError(f"init: key must be one jax key; got {_told(key)}. Pass for example jax.random.key(0).")
    key = key if typed else jax.random.wrap_key_data(key)
    refuse_unstable("init", key)
    return key


def _takes_scale(function: Any) -> bool | None:
    """Whether a function takes `scale=`, as a GradFn does; None if its signature does not say."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    return "scale" in parameters


def _told(x: Any) -> str:
    if hasattr(x, "dtype"):
        return kind(x)
    if isinstance(x, Staged):
        return f"a {type(x).__name__}"
    name = getattr(x, "__name__", None)
    if callable(x) and name:
        return f"the function {name!r}"
    return f"{type(x).__name__} {x!r}" if len(repr(x)) < 60 else type(x).__name__
