"""A loss that is traced as on one device: with `local=True`, and to find out why it cannot be traced on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax

from shardkit._jax.compat import tracked_axes
from shardkit._jax.one_device import as_on_one_device, has_vmapped_collective, noting
from shardkit.on_device.batch import check_whole
from shardkit.on_device.handles import is_handle

# `call_untyped(fn, *args)` shows only whether `fn` can be traced without the types of axes: it may communicate.
call_untyped = partial(as_on_one_device, may_send=True)


def _call_vmapped(call_loss_by: Callable[[Callable[..., Any]], Any]) -> None:
    """Calls a loss without the types of axes, if it has a collective over an axis of vmap.

    Raises:
        LookupError: it has none.
    """
    vmapped_flags = []

    def call(fn: Callable[..., Any], *args: Any) -> Any:
        vmapped_flags.append(has_vmapped_collective(fn, *args))
        return call_untyped(fn, *args)

    call_loss_by(call)
    if not any(vmapped_flags):
        raise LookupError


def call_on_one_device(fn: Callable[..., Any], *args: Any) -> Any:
    """Calls a loss with its arguments, traced as on one device.

    Raises:
        ValueError: this device has only a part of an argument.
    """
    # Split leaves and lazy leaves are refused before the loss is called: inside, where there is no mesh, jax would only
    # say that an axis is unbound.
    check_whole()
    for leaf in jax.tree.leaves(args, is_leaf=is_handle):
        if is_handle(leaf):
            raise ValueError(
                "value_and_grad: with local=True a loss does not communicate, and must get weights that are gathered; "
                f"got {leaf}, a lazy leaf. Leave out layerwise= of the plan, or local=."
            )
    return as_on_one_device(fn, *args)


def note_type_errors(call_loss_by: Callable[[Callable[..., Any]], Any]) -> AbstractContextManager[None]:
    """A context that adds a note to the error of a loss which cannot be traced only because of the types of axes.

    `call_loss_by(caller)` calls the loss by `caller(loss, *args)`. Callers are `call_on_one_device`, which fails for a
    loss that communicates, and `call_untyped`, on the mesh without the types of axes. The note is of the first caller
    by which the loss can be traced. A collective over an axis of vmap has a note of its own.
    """
    if not tracked_axes():
        return nullcontext()
    cast = "what is the same on all devices at {line}, as a loop's beginning is, sk.vary_like(start, x) of its data x."
    local = "Pass value_and_grad(loss_fn, local=True), and local=True to make_eval_step; or cast " + cast
    vmapped = (
        "value_and_grad: {line}: jax cannot trace a collective over an axis of jax.vmap inside of shard_map; got "
        "`{text}`. Take the sum or mean over the dim that is mapped, outside of the vmap; over the examples of all "
        "devices it is sk.all_reduce."
    )
    apart = f"value_and_grad: as on one device the loss can be traced. {local}"
    without_types = f"value_and_grad: without the types of axes the loss can be traced. Cast {cast}"
    return noting(
        (vmapped, partial(_call_vmapped, call_loss_by)),
        (apart, partial(call_loss_by, call_on_one_device)),
        (without_types, partial(call_loss_by, call_untyped)),
    )
