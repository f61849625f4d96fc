"""The loss curve of a training run, as a plot in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.text import Text


class Point(NamedTuple):
    """A point of the loss curve: step, training loss, and validation loss if it was measured."""

    step: int
    train_loss: float
    validation_loss: float | None


def losses(curve: Sequence[Point]) -> dict[str, dict[int, float]]:
    """The losses by name and step, for `viz.losses`."""
    held = {p.step: p.validation_loss for p in curve if p.validation_loss is not None}
    return {"training": {p.step: p.train_loss for p in curve}} | ({"validation": held} if held else {})


def picture(curve: Sequence[Point], color: bool) -> Text:
    """The losses as a text plot."""
    import uniplot

    held = [(p.step, p.validation_loss) for p in curve if p.validation_loss is not None]
    xs, ys = [[p.step for p in curve]], [[p.train_loss for p in curve]]
    if color and len(held) > 1:  # without color the two lines look the same
        xs.append([step for step, _ in held])
        ys.append([loss for _, loss in held])
    picture = uniplot.plot_to_string(
        xs=xs,
        ys=ys,
        lines=True,
        legend_labels=["training loss", "validation loss"] if len(xs) > 1 else None,
        title="loss in nats per byte, by step" if len(xs) > 1 else "training loss in nats per byte, by step",
        width=70,
        height=14,
        color=color,
    )
    return Text.from_ansi(picture)
