"""`shardkit draw --schedule lockstep --devices 4 --microbatches 8`: a schedule as text, numbers and picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shardkit import viz
from shardkit.cli.output import Piped, WithJson, write_json
from shardkit.cli.plans import named, read
from shardkit.schedules import Schedule

EXAMPLES = {
    "shardkit draw --schedule lockstep --devices 4 --microbatches 8": "as text",
    "shardkit draw --schedule gpipe --devices 4 --microbatches 8 --output a.svg": "as a picture",
    "shardkit draw --csv mine.csv": "a schedule of your own",
}


@dataclass(frozen=True)
class Options(WithJson):
    """Options of `shardkit draw`."""

    schedule: str | None = None
    """gpipe, one_f_one_b, zero_bubble_h1, zero_bubble_v, dualpipe_v, interleaved, breadth_first or lockstep; needs
    --devices and --microbatches."""
    devices: int | None = None
    """Devices along the stage axis."""
    microbatches: int | None = None
    """Microbatches per step."""
    chunks: int | None = None
    """Model chunks (virtual stages) per device, for interleaved, breadth_first and lockstep."""
    csv: Path | None = None
    """Read the schedule from a file: one line per device, one cell per tick, such as 2F0."""
    forward: float = 1.0
    """Time of one microbatch's forward pass on one device, in any unit."""
    backward: float = 2.0
    """Time of its whole backward pass, in the same unit."""
    communication: float = 0.0
    """Time to send a result to the next device."""
    output: Path | None = None
    """Write the picture to this .png or .svg file; needs the extra [viz]."""
    to_csv: Path | None = None
    """Write the schedule to this file, for --csv or `shardkit train --schedule`."""


def draw(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Draw a pipeline schedule and simulate it: the grid, the makespan, the bubble, the activations in flight."""
    console = Piped(soft_wrap=True, highlight=False, markup=False, emoji=False)
    o = options
    schedule = _read(o, o.csv) if o.csv else _built(o)
    timeline = schedule.simulate(o.forward, o.backward, communication=o.communication)
    slots = schedule.slots()
    console.print(str(schedule))
    console.print(f"\n{viz.title(schedule)}")
    console.print(viz.facts(timeline))
    console.print(f"most in flight on each device: {', '.join(f'{peak:g}' for peak in timeline.peak_in_flight)}")
    console.print(
        f"slots: {slots.inputs} for inputs, {slots.cotangents} for cotangents, {slots.kept} for weight-gradient "
        "residuals"
    )
    if o.to_csv:
        o.to_csv.parent.mkdir(parents=True, exist_ok=True)
        o.to_csv.write_text(schedule.to_csv())
    if o.output:
        viz.draw(schedule, o.output, forward=o.forward, backward=o.backward, communication=o.communication)
    rows = [
        {"device": device, "order": schedule.order(device), "peak_in_flight": timeline.peak_in_flight[device]}
        for device in range(schedule.devices)
    ]
    facts = {"schedule": schedule.name, "microbatches": schedule.microbatches, "chunks": schedule.chunks}
    facts |= {"makespan": timeline.makespan, "bubble": timeline.bubble}
    facts |= {f"{name}_slots": getattr(slots, name) for name in ("inputs", "cotangents", "kept")}
    write_json(o.json, "draw", rows, **facts)
    return 0


def _built(o: Options) -> Schedule:
    if o.schedule is None or o.devices is None or o.microbatches is None:
        raise ValueError(
            "draw: a schedule must be given by --schedule, --devices and --microbatches or by --csv; got "
            f"{_given(o) or 'none'}. Write for example --schedule lockstep --devices 4 --microbatches 8."
        )
    return named("draw", o.schedule, o.devices, o.microbatches, o.chunks)


def _read(o: Options, file: Path) -> Schedule:
    if given := _given(o):
        raise ValueError(
            f"draw: --csv must come alone, because the file holds the whole schedule; got {given} too. Leave it out."
        )
    return read("draw", file)


def _given(o: Options) -> str:
    words = {"schedule": o.schedule, "devices": o.devices, "microbatches": o.microbatches, "chunks": o.chunks}
    return ", ".join(f"--{word}" for word, value in words.items() if value is not None)
