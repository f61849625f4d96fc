"""Meshes, and the layouts that follow from a plan, as tests write them."""

import math
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.plans.splits import map_layouts

MODEL_MESHES: list[Any] = [  # sizes and axis
    ({"model": 1}, "model"),
    ({"model": 3}, "model"),
    ({"model": 5}, "model"),
    ({"data": 2, "model": 4}, "model"),
    ({"model": 2, "data": 2, "other": 2}, ("other", "model")),
]


def mesh_of(**sizes: int) -> Any:
    """A mesh over the first devices there are."""
    return sk.make_mesh(jax.devices()[: math.prod(sizes.values())], **sizes)


class Specs(NamedTuple):
    """The layouts of a leaf; `grad` is None for a leaf that is not lazy."""

    rest: P = P()
    seen: P = P()
    update: P = P()
    grad: P | None = None
    entry: bool = False
    padded: Any = ()
    varies: tuple[str, ...] = ()


def specs(layouts: Any) -> Any:
    """The Specs of each LeafLayout in a tree."""
    of = lambda x: Specs(x.rest, x.seen, x.update, x.grad if x.lazy else None, x.opened_before_loss, x.padded, x.varies)  # noqa: E731
    return map_layouts(of, layouts)
