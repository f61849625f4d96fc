"""Whether a part of a program may run on some devices of an axis while others run another part, or none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from shardkit._arguments.checks import name_axes, quote
from shardkit._jax.jaxprs import Site, kind_of, mesh_axes, walk


def find_collectives(jaxpr: Any) -> Iterator[Site]:
    """Every collective of a jaxpr, inside its loops and branches too."""
    for site in walk(jaxpr):
        if kind_of(site.equation):
            yield site


def refuse_divergent(where: str, jaxprs: Iterable[Any], axes: tuple[str, ...], remedy: str) -> None:
    """Refuses collectives that deadlock where devices branch differently along `axes`.

    All members of a replica group of an all_reduce over other axes have the same index along `axes`, and take the same
    branch. A ppermute has no groups: it waits for the devices in the other branch.

    Worked example: a mesh of stage=2, model=2, and a branch that the two devices of stage 0 take. An all_reduce over
    "model" is between these two: both take part. One over "stage" waits for stage 1, which does not run it. A ppermute
    over "model" moves between devices of one stage alone, but is one call of all four.
    """
    for jaxpr in jaxprs:
        for site in find_collectives(jaxpr):
            collective = kind_of(site.equation)
            names = mesh_axes(site.equation)
            if collective == "ppermute" or set(names) & set(axes):
                raise ValueError(
                    f"{where}: a stage must hold no ppermute and no collective over {name_axes(axes)}, because devices "
                    f"take different branches there; got {collective} over {quote(names)} at {site.source}. {remedy}"
                )


def refuse_mixed(where: str, jaxprs: Iterable[Any], axes: tuple[str, ...]) -> None:
    """Refuses collectives over `axes`, along which devices run different microbatches."""
    for jaxpr in jaxprs:
        for site in find_collectives(jaxpr):
            names = mesh_axes(site.equation)
            if set(names) & set(axes):
                raise ValueError(
                    f"{where}: a stage must hold no collective over {name_axes(axes)}, because its devices run "
                    f"different microbatches; got {kind_of(site.equation)} over {quote(names)} at {site.source}. "
                    f"Leave that axis out, as moe(..., stage={axes[0]!r}) does."
                )
