"""The mesh axes over which the reference transformer runs, and whether a plan splits what they say."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from shardkit._check import Axis, named
from shardkit._compat import varying_axes
from shardkit._typed import check_fields
from shardkit.collectives import axis_size
from shardkit.collectives.matmul import Impl
from shardkit.layers.matmul import live_axes
from shardkit.layers.zigzag import Order, positions
from shardkit.partitioning.token_axes import token_axes


@dataclass(frozen=True)
class Axes:
    """The mesh axes over which the model itself communicates; without any it is a model on one device.

    Attributes:
        model: tensor parallelism: heads, hidden width and vocabulary are split, as `tensor_rules` lays them out.
        sequence: between blocks, tokens are split over `model` too.
        context: tokens are split over it, and attention goes round a ring.
        ulysses: tokens are split over it, and attention splits heads instead; with `context`, inside of it.
        order: the order of the tokens along `context`; the batch comes in natural order.
        expert: the experts are split over it.
        impl: how gathered matmuls are cut up, with `sequence`.
        stage: the pipeline's, where the layers run as its stages.
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


def token_places(tokens: int, axes: Axes) -> jax.Array:
    """Where this device's tokens stand in the sequence, [T]."""
    if axes.context is not None:
        return positions(tokens, axes.context, order=axes.order, ulysses=axes.ulysses)
    return jnp.arange(tokens, dtype=jnp.int32) if axes.ulysses is None else positions(tokens, axes.ulysses)


def check_tokens(axes: Axes, tokens_bT: jax.Array) -> None:
    """Refuses tokens that are not split over the axes along which attention looks, over all of them and no other.

    A hand-written shard_map says of its tokens over which axes they vary, and no more.
    """
    split, looked = token_axes(), set[str]()
    for name, axis in (("context", axes.context), ("ulysses", axes.ulysses)):
        live = set(live_axes("transformer", axis))
        whole = live - varying_axes(tokens_bT)
        looked |= live
        rule, remedy = f"transformer: the tokens must be split over axes.{name}={axis!r}", f"Chain cp({axis!r}) into"
        if whole:
            raise ValueError(f"{rule}; got the same along {named(sorted(whole))}. {remedy} the plan.")
        examples = live if split is None else live & set(split)
        if live != examples:
            raise ValueError(
                f"{rule}; got other examples along {named(sorted(live - examples))}. {remedy} the plan, and dp over "
                "another axis."
            )
    if split is not None and not set(split) <= looked:
        other = tuple(axis for axis in split if axis not in looked)
        raise ValueError(
            f"transformer: attention must look along {named(other)}, over which the plan splits the tokens; got "
            f"axes.context={axes.context!r} and axes.ulysses={axes.ulysses!r}. Pass Axes(context=...), or "
            "Axes(ulysses=...), with the axes of the plan's cp."
        )


def check_split(what: str, here: int, whole: int, axes: Axes) -> None:
    """Refuses weights that are not split over the axes of the model: sums over devices would count them again."""
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
