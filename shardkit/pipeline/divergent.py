"""Whether a part of a program may run on some devices of an axis while others run another part, or none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from shardkit._arguments.checks import named, quoted
from shardkit._jax import compat
from shardkit._jax.jaxprs import kind_of, mesh_axes, walk

_HERE = Path(__file__).parent


class Sent(NamedTuple):
    """A collective in a traced piece: its kind, its axes, and the source line that issues it."""

    kind: str
    axes: tuple[str, ...]
    line: str


def collectives(jaxpr: Any) -> Iterator[Sent]:
    """Every collective of a jaxpr, inside its loops and branches too."""
    for site in walk(jaxpr):
        if kind := kind_of(site.equation):
            yield Sent(kind, mesh_axes(site.equation), _line(site.equation))


def _line(equation: Any) -> str:
    """The innermost line of the user's piece outside shardkit; without one, the innermost line."""
    inside = [*takewhile(lambda frame: Path(frame[0]) != _HERE / "pieces.py", compat.user_frames(equation))]
    own = [frame for frame in inside if _HERE.parent not in Path(frame[0]).parents] or inside
    return "{}:{} ({})".format(*own[0]) if own else "an unknown line"


def refuse_divergent(where: str, jaxprs: Iterable[Any], axes: tuple[str, ...], remedy: str) -> None:
    """Refuses collectives that deadlock where devices branch differently along `axes`.

    All members of a replica group of an all_reduce over other axes have the same index along `axes`, and take the same
    branch. A ppermute has no groups: it waits for the devices in the other branch.
    """
    for jaxpr in jaxprs:
        for sent in collectives(jaxpr):
            if sent.kind == "ppermute" or set(sent.axes) & set(axes):
                raise ValueError(
                    f"{where}: a stage must hold no ppermute and no collective over {named(axes)}, because devices "
                    f"take different branches there; got {sent.kind} over {quoted(sent.axes)} at {sent.line}. {remedy}"
                )


def refuse_mixed(where: str, jaxprs: Iterable[Any], axes: tuple[str, ...]) -> None:
    """Refuses collectives over `axes`, along which devices run different microbatches."""
    for sent in (sent for jaxpr in jaxprs for sent in collectives(jaxpr)):
        if set(sent.axes) & set(axes):
            raise ValueError(
                f"{where}: a stage must hold no collective over {named(axes)}, whose devices run other microbatches;"
                f" got {sent.kind} over {quoted(sent.axes)} at {sent.line}. Leave that axis out, as "
                f"moe(..., stage={axes[0]!r}) does."
            )
