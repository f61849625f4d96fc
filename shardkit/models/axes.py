"""The mesh axes of the reference transformer, and checks that the plan agrees with them."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from shardkit._arguments.checks import Axis, named
from shardkit._arguments.typed import check_fields
from shardkit._jax.compat import varying_axes
from shardkit.collectives import axis_size
from shardkit.collectives.matmul import Impl
from shardkit.layers.matmul import live_axes
from shardkit.layers.zigzag import Order, positions
from shardkit.on_device.token_axes import token_axes


@dataclass(frozen=True)
class Axes:
    """The mesh axes over which the model communicates; by default none, for one device.

    Attributes:
        model: tensor parallelism over heads, hidden width and vocabulary, laid out by `tensor_rules`.
        sequence: sequence parallelism: between blocks, tokens are split over `model`.
        context: context parallelism: tokens are split over it, with ring attention.
        ulysses: tokens are split over it, with attention split by heads; with `context`, it is the inner axis.
        order: the order of the tokens along `context`; the batch is in contiguous order.
        expert: expert parallelism.
        impl: with `sequence`, as for `all_gather_matmul`.
        stage: the axis of the pipeline, if the layers run as its stages.
    """

    model: Axis | None = None
    sequence: bool = False
    context: Axis | None = None
    ulysses: Axis | None = None
    order: Order = "zigzag"
    expert: Axis | None = None
    impl: Impl = "auto"
    stage: Axis | None = None

    def __post_init__(self) -> None:
        check_fields(self)


ONE_DEVICE = Axes()
"""No axis at all: the model as it is on one device."""


def token_positions(tokens: int, axes: Axes) -> jax.Array:
    """Positions of this device's tokens in the sequence, [T]."""
    if axes.context is not None:
        return positions(tokens, axes.context, order=axes.order, ulysses=axes.ulysses)
    return jnp.arange(tokens, dtype=jnp.int32) if axes.ulysses is None else positions(tokens, axes.ulysses)


def check_tokens(axes: Axes, tokens_bT: jax.Array) -> None:
    """Refuses tokens that are not split over exactly the axes of attention.

    In a hand-written shard_map only the axes over which the tokens vary are known.
    """
    split, attended = token_axes(), set[str]()
    for name, axis in (("context", axes.context), ("ulysses", axes.ulysses)):
        live = set(live_axes("transformer", axis))
        whole = live - varying_axes(tokens_bT)
        attended |= live
        rule, remedy = f"transformer: the tokens must be split over axes.{name}={axis!r}", f"Chain cp({axis!r}) into"
        if whole:
            raise ValueError(f"{rule}; got the same tokens along {named(sorted(whole))}. {remedy} the plan.")
        examples = live if split is None else live & set(split)
        if live != examples:
            raise ValueError(
                f"{rule}; got different examples along {named(sorted(live - examples))}. {remedy} the plan, and dp "
                "over another axis."
            )
    if split is not None and not set(split) <= attended:
        other = tuple(axis for axis in split if axis not in attended)
        raise ValueError(
            f"transformer: attention must run over {named(other)}, which split the tokens in the plan; got "
            f"axes.context={axes.context!r} and axes.ulysses={axes.ulysses!r}. Pass Axes(context=...), or "
            "Axes(ulysses=...), with the axes of the plan's cp."
        )


def check_split(what: str, here: int, whole: int, axes: Axes) -> None:
    """Refuses weights that are not split over the model axis: sums over devices would count them more than once."""
    ways = 1 if axes.model is None else axis_size(axes.model)
    if here * ways == whole:
        return
    remedy = f"Chain tp({axes.model!r}, tensor_rules(config, {axes.model!r}, {ways})) into the plan."
    if axes.model is None:
        remedy = "Pass Axes(model=...) with the axis of the plan's tp."
    what, noun = f"{whole} {what}", what.split()[-1]
    raise ValueError(
        f"transformer: the {what} must be split over axes.model={axes.model!r}; got {here} {noun} on each of {ways} "
        f"devices. {remedy}"
    )
