"""Whether a part of a program may run on some devices of an axis while others run another part, or none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from shardkit._arguments.checks import named, quoted
from shardkit._jax.jaxprs import Site, kind_of, mesh_axes, walk


def collectives(jaxpr: Any) -> Iterator[Site]:
    """Every collective of a jaxpr, inside its loops and branches too."""
    return (site for site in walk(jaxpr) if kind_of(site.equation))


def refuse_divergent(where: str, jaxprs: Iterable[Any], axes: tuple[str, ...], remedy: str) -> None:
    """Refuses collectives that deadlock where devices branch differently along `axes`.

    All members of a replica group of an all_reduce over other axes have the same index along `axes`, and take the same
    branch. A ppermute has no groups: it waits for the devices in the other branch.
    """
    for jaxpr in jaxprs:
        for site in collectives(jaxpr):
            kind, over = kind_of(site.equation), mesh_axes(site.equation)
            if kind == "ppermute" or set(over) & set(axes):
                raise ValueError(
                    f"{where}: a stage must hold no ppermute and no collective over {named(axes)}, because devices "
                    f"take different branches there; got {kind} over {quoted(over)} at {site.source}. {remedy}"
                )


def refuse_mixed(where: str, jaxprs: Iterable[Any], axes: tuple[str, ...]) -> None:
    """Refuses collectives over `axes`, along which devices run different microbatches."""
    for site in (site for jaxpr in jaxprs for site in collectives(jaxpr)):
        over = mesh_axes(site.equation)
        if set(over) & set(axes):
            raise ValueError(
                f"{where}: a stage must hold no collective over {named(axes)}, whose devices run other microbatches;"
                f" got {kind_of(site.equation)} over {quoted(over)} at {site.source}. Leave that axis out, as "
                f"moe(..., stage={axes[0]!r}) does."
            )
