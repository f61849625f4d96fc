"""`shardkit train data=8`: the loop of `training.py`, with a progress bar, and JSON lines."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any, TextIO

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import shardkit as sk
from shardkit.cli.output import Json, console, header, plain, writing
from shardkit.cli.train_options import TrainOptions
from shardkit.cli.training import Log
from shardkit.cli.training import train as run

EXAMPLES = {
    "shardkit train data=8 --verify 3": "data parallelism, compared with one device",
    "shardkit train data=2 fsdp=4 --json run.jsonl": "sharded state; every logged step as a JSON line",
    "shardkit train data=2 model=4 --sequence": "tensor and sequence parallelism",
    "shardkit train data=2 stage=4 --schedule one_f_one_b": "a pipeline",
    "shardkit train fsdp=8 --checkpoint runs/a": "saves; the same command again resumes",
}


@dataclass(frozen=True)
class Options(TrainOptions):
    """Options of `shardkit train`."""

    mesh: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="AXIS=SIZE ...")] = ("data=-1",)
    json: Json = None
    """Write a JSON line for each logged step, and for what else happens, as it happens; with - to standard output."""


def train(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Train a byte-level transformer on text, with the same numbers on every mesh."""
    if options.json is not None and options.json.is_dir():
        raise ValueError(
            f"train: --json must be a file; got the directory {options.json}. Pass for example {options.json}/run.json."
        )
    with CommandLog(options, console()) as log:
        return run(options, log).end.code


class CommandLog(Log):
    """Lines above a progress bar on a terminal, lines in a pipe; rows as JSON lines."""

    def __init__(self, options: Options, console: Console):
        self.options, self.console = options, console
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._bar = self._progress.add_task("", total=options.steps)
        self._open = ExitStack()
        self._out: TextIO | None = None

    def __enter__(self) -> CommandLog:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def say(self, text: str) -> None:
        if sk.runtime.is_main():
            self.console.print(text)

    def step(self, number: int) -> None:
        self._progress.update(self._bar, completed=number)

    def row(self, kind: str, /, **values: Any) -> None:
        if not sk.runtime.is_main():
            return
        if kind == "run":
            # A run that resumes appends, and one that has finished keeps its file as it is.
            file, first = self.options.json, values["first_step"]
            finished = first > self.options.steps
            if file is not None and not (finished and file.exists()):
                self._out = self._open.enter_context(writing(file, append=first > 1))
            if self.console.is_terminal and not finished:
                self._open.enter_context(self._progress)
            values = header("train") | values
        if self._out is not None:
            self._out.write(json.dumps(plain({"row": kind} | values)) + "\n")
            self._out.flush()  # so that others can follow
