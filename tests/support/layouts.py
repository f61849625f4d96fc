"""The layouts that follow from a plan, as tests write them."""

from typing import Any, NamedTuple

from jax.sharding import PartitionSpec as P

from shardkit.plans.placement import map_layouts


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
    of = lambda x: Specs(x.rest, x.seen, x.update, x.grad if x.lazy else None, x.entry, x.padded, x.varies)  # noqa: E731
    return map_layouts(of, layouts)
