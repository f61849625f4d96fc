"""`shardkit chaos -n 4 -- train.py`: plants faults in a job that restarts by itself, and checks what follows."""

from __future__ import annotations

import signal
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated

import tyro
from rich.table import Table

from shardkit import viz
from shardkit._check import counted
from shardkit.cli.output import Json, console, write_json
from shardkit.cli.pictures import check_picture
from shardkit.runtime.cluster.chaos import DISTURBED, UNDISTURBED, Outcome
from shardkit.runtime.cluster.chaos import chaos as run_under_faults
from shardkit.runtime.cluster.disturbed import RUN, losses_in
from shardkit.runtime.cluster.faults import KINDS, Kind
from shardkit.runtime.cluster.wall_clock import compiler

_LOG = "{run}/log.jsonl"
EXAMPLES = {
    "shardkit chaos -n 2 --checkpoints '{run}/saved' -- train.py '{run}'": "ten faults",
    "shardkit chaos --every 200 --output chaos.svg -- train.py '{run}'": "at steps; a picture",
}


@dataclass(frozen=True)
class Options:
    """Options of `shardkit chaos`."""

    command: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="-- COMMAND ...")] = ()
    """What to run, after --, as with shardkit launch; in it, {run} is the folder of the run."""
    losses: str = _LOG
    """The JSON lines that the command writes, with the step and loss of each step."""
    checkpoints: str | None = None
    """The directory of its checkpoints; without it none is damaged."""
    processes: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 2
    """Processes in the job."""
    devices: int | None = None
    """Simulated devices per process."""
    faults: int = 10
    """Faults to plant, one after another."""
    kinds: tuple[Kind, ...] = ()
    """Kinds of faults; by default all that the job and this machine have what they need for."""
    seed: int = 0
    """Which kinds, processes and times are drawn."""
    every: int | None = None
    """Plant only after steps that are a multiple of this; by default after the first loss of a restart."""
    latest: float = 3.0
    """Most seconds from the first loss of the run or a restart, or from a step of --every, to the next fault."""
    tolerance: float = 0.0
    """Largest relative difference of a loss; 0 for the same bits."""
    patience: float = 120.0
    """Seconds that a detection, and a recovery, may take."""
    folder: Path | None = None
    """Where to run, an empty folder; by default a temporary one."""
    output: Path | None = None
    """A picture, .png or .svg: the losses of both runs, and the faults."""
    json: Json = None
    """Write the results to this file, or with - to standard output."""


def chaos(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Plant faults in a job that restarts by itself, and check each loss against the undisturbed run's."""
    o, here = options, console()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # unlike an end at once: with the job
    check_picture("chaos", o.output)
    folder = Path(mkdtemp(prefix="shardkit-chaos-")) if o.folder is None else o.folder
    here.print(f"runs in {folder}; the undisturbed one first")
    lacking = [] if o.checkpoints else ["damage"]
    lacking += [] if compiler() else ["clock"]
    kinds = o.kinds or tuple(kind for kind in KINDS if kind not in lacking)
    outcomes = run_under_faults(
        o.command,
        processes=o.processes,
        losses=o.losses,
        folder=folder,
        faults=o.faults,
        seed=o.seed,
        kinds=kinds,
        latest=o.latest,
        every=o.every,
        devices=o.devices,
        checkpoints=o.checkpoints,
        tolerance=o.tolerance,
        patience=o.patience,
        told=lambda outcome: here.print(_words(outcome)),
    )
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    here.print(_table(outcomes, kinds))
    if len(outcomes) < o.faults:
        here.print(f"the job ended after {len(outcomes)} of {o.faults} faults: give it more steps")
    for outcome in wrong:
        here.print(f"after {outcome.fault.kind} of process {outcome.fault.process}: {outcome.wrong}")
    if o.output:
        runs = {name: losses_in(Path(o.losses.replace(RUN, str(folder / name)))) for name in (UNDISTURBED, DISTURBED)}
        steps = [outcome.step for outcome in outcomes]
        viz.losses(
            {"undisturbed": runs[UNDISTURBED], f"under {counted(len(steps), 'fault')}": runs[DISTURBED]},
            marks={"a fault": steps},
            output=o.output,
        )
    rows = [{**outcome._asdict(), **outcome.fault._asdict()} for outcome in outcomes]
    write_json(o.json, "chaos", [{name: row[name] for name in row if name != "fault"} for row in rows])
    return int(bool(wrong) or len(outcomes) < o.faults)


def _words(outcome: Outcome) -> str:
    kind, process = outcome.fault[:2]
    text = f"{kind} of process {process} after step {outcome.step}"
    if outcome.wrong or outcome.recovered is None:
        return f"{text}: {outcome.wrong}"
    if outcome.detected is None:
        return f"{text}: the job went on"
    return f"{text}: detected in {outcome.detected:.1f} s, the next loss after {outcome.recovered:.1f} s"


def _table(outcomes: list[Outcome], kinds: tuple[Kind, ...]) -> Table:
    table = Table("fault", "planted", "recovered", "detected, median", "most", "recovered in, median", "most")
    for kind in kinds:
        of_kind = [each for each in outcomes if each.fault.kind == kind]
        table.add_row(kind, *_row(of_kind))
    if len(kinds) > 1:
        table.add_row("all", *_row(outcomes), style="bold")
    return table


def _row(outcomes: list[Outcome]) -> list[str]:
    """The cells of a kind of faults: those after which a job went on count as recovered, and have no times."""
    right = [each for each in outcomes if not each.wrong]
    pairs = [(each.detected, each.recovered) for each in right if each.detected is not None]
    times = [[seconds or 0.0 for seconds in each] for each in zip(*pairs, strict=True)] or [[], []]
    cells = [f"{figure(each):.1f} s" if each else "" for each in times for figure in (statistics.median, max)]
    return [str(len(outcomes)), str(len(right)), *cells]
