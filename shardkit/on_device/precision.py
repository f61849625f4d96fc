"""Dtypes of parameters, compute, reductions and metrics, and the float16 loss scale."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardkit._arguments.checks import at_least, quote
from shardkit._arguments.typed import check_kind


class LossScale(NamedTuple):
    """The state of dynamic loss scaling.

    Attributes:
        scale: float32 scalar, a power of two: the factor on the gradients inside the GradFn.
        good_steps: int32 scalar, finite steps since the scale last changed.
    """

    scale: jax.Array
    good_steps: jax.Array


class Precision(NamedTuple):
    """The dtypes of parameters, computation and sums. Integers and keys are never cast.

    Attributes:
        param: dtype of the parameters in the state and, without a master copy, of the optimizer's arithmetic.
        compute: dtype of parameters and floating-point batch arrays inside the GradFn. The step does not cast arrays
            from which you compute the weight of a Mean: bfloat16 counts exactly only up to 256.
        reduce: dtype in which devices sum gradients. Microbatches are always summed in float32.
        output: dtype of the metrics.
        loss_scale: None, a fixed power of two, or "dynamic". A dynamic scale is halved when a gradient is not finite,
            and all devices skip this step. It doubles after `growth_interval` finite steps, up to 2**64.
        growth_interval: finite steps before a dynamic scale doubles.
        master: dtype of a second copy of the parameters; None for no copy. The optimizer updates this copy, and the
            state stores it with the optimizer state, in the layout of the update. With `param` and `compute` in
            bfloat16 you get the bytes of the ZeRO papers: 2 per parameter on every device, 12 split.
    """

    param: Any = jnp.float32
    compute: Any = jnp.float32
    reduce: Any = jnp.float32
    output: Any = jnp.float32
    loss_scale: float | str | None = None
    growth_interval: int = 2000
    master: Any = None


FLOAT32 = Precision()
BFLOAT16 = Precision(compute=jnp.bfloat16)
FLOAT16 = Precision(compute=jnp.float16, loss_scale="dynamic")
_NAMED = {"no": FLOAT32, "bf16": BFLOAT16, "fp16": FLOAT16}
_FIRST_DYNAMIC_SCALE = 2.0**15  # the largest power of two that float16 holds
# Gradients are divided by the scale times the weight of the loss, in float32: were that infinite, they would be zero.
_LARGEST_SCALE = 2.0**64


def precision_of(name: Precision | str | None) -> Precision:
    """The policy for a name: "no" (or None), "bf16" (compute in bfloat16), "fp16" (with dynamic loss scaling).

    Refuses dtypes that are not floating-point, or have more digits than the sums, which are float32; and loss scales
    that round, or overflow float16.
    """
    if isinstance(name, Precision):
        _check_dtypes(name)
        _check_loss_scale(name)
        check_kind("Precision", "growth_interval", name.growth_interval, (int,))
        at_least("Precision", 1, growth_interval=name.growth_interval)
        return name
    if name is None:
        name = "no"
    policy = _NAMED.get(name)
    if policy is None:
        raise ValueError(
            f"precision: the name must be one of {quote(_NAMED)}; got {name!r}. Pass one of them or a Precision."
        )
    return policy


def _check_dtypes(policy: Precision) -> None:
    for field in ("param", "compute", "reduce", "output", "master"):
        dtype = getattr(policy, field)
        if dtype is None and field == "master":
            continue
        if not _is_floating(dtype):
            raise ValueError(
                f"Precision: {field} must be a floating-point dtype; got {dtype!r}. Pass for example jnp.bfloat16."
            )
        if jnp.dtype(dtype).itemsize > 4:
            raise ValueError(
                f"Precision: {field} must be at most float32, because microbatches and means are summed in "
                f"float32; got {jnp.dtype(dtype).name}. Pass jnp.float32."
            )


def _check_loss_scale(policy: Precision) -> None:
    scale = policy.loss_scale
    if scale in (None, "dynamic"):
        return
    if not _is_power_of_two(scale):
        raise ValueError(
            f"Precision: loss_scale must be None, 'dynamic' or a power of two from 2**-64 to 2**64, so that "
            f"scaling is exact; got {scale!r}. Pass for example 1024.0."
        )
    if isinstance(scale, int | float) and policy.compute == jnp.float16 and scale > _FIRST_DYNAMIC_SCALE:
        raise ValueError(
            f"Precision: loss_scale must be at most {_FIRST_DYNAMIC_SCALE:g} with compute=float16, or every step "
            f"overflows and is skipped; got {scale!r}. Lower it."
        )


def first_loss_scale(policy: Precision) -> LossScale | None:
    """The loss scale of a new TrainState; None without scaling."""
    scale = policy.loss_scale
    if scale is None:
        return None
    if scale == "dynamic":
        scale = _FIRST_DYNAMIC_SCALE
    return LossScale(jnp.float32(float(scale)), jnp.int32(0))


def next_loss_scale(policy: Precision, state: LossScale, finite: jax.Array) -> LossScale:
    """The loss scale after a step; `finite` says whether its gradients all were."""
    if policy.loss_scale != "dynamic":
        return state
    # Worked example, with growth_interval=2, from a scale of 8: finite -> 8, finite -> 16, not finite -> 8.
    good_steps = jnp.where(finite, state.good_steps + 1, 0)
    grows = good_steps == policy.growth_interval
    larger = jnp.minimum(state.scale * 2, _LARGEST_SCALE)
    after_finite = jnp.where(grows, larger, state.scale)
    scale = jnp.where(finite, after_finite, jnp.maximum(state.scale / 2, 1.0))
    return LossScale(scale, jnp.where(grows, 0, good_steps))


def _is_floating(dtype: Any) -> bool:
    try:
        return dtype is not None and bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False


def _is_power_of_two(x: Any) -> bool:
    if isinstance(x, bool) or not isinstance(x, int | float):
        return False
    if not 1 / _LARGEST_SCALE <= x <= _LARGEST_SCALE:
        return False
    mantissa, _ = math.frexp(x)
    # frexp takes 1024 apart into 0.5 * 2**11: a power of two has the mantissa 0.5.
    return mantissa == 0.5
