"""A loss that is traced as on one device: with `local=True`, and to find out why it cannot be traced on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax

from shardkit._jax.compat import tracked_axes
from shardkit._jax.one_device import as_on_one_device, noting
from shardkit.on_device.batch import check_whole
from shardkit.on_device.handles import is_handle

# `call_untyped(fn, *args)` shows only whether `fn` can be traced without the types of axes: it may communicate.
call_untyped = partial(as_on_one_device, may_send=True)


def call_on_one_device(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)`, a loss and what it is called with, as on one device.

    Raises:
        ValueError: an argument of which this device has a part.
    """
    # Both are found in advance: inside, where there is no mesh, jax would say that an axis is unbound.
    check_whole()
    lazy = [leaf for leaf in jax.tree.leaves(args, is_leaf=is_handle) if is_handle(leaf)]
    if lazy:
        raise ValueError(
            "value_and_grad: with local=True a loss does not communicate, and must get weights that are gathered; got "
            f"{lazy[0]}, a lazy leaf. Leave out layerwise= of the plan, or local=."
        )
    return as_on_one_device(fn, *args)


def note_type_errors(on_one_device: Callable[[], Any], untyped: Callable[[], Any]) -> AbstractContextManager[None]:
    """A loss inside of it that only the types of axes keep from being traced ends in an error with a note of it.

    `on_one_device` calls it as on one device, which a loss that communicates cannot be; `untyped` without these types.
    """
    if not tracked_axes():
        return nullcontext()
    cast = "what is the same on all devices at {line}, as a loop's beginning is, sk.vary_like(start, x) of its data x."
    local = "Pass value_and_grad(loss_fn, local=True), and local=True to make_eval_step; or cast " + cast
    return noting(
        (f"value_and_grad: as on one device the loss can be traced. {local}", on_one_device),
        (f"value_and_grad: without the types of axes the loss can be traced. Cast {cast}", untyped),
    )
