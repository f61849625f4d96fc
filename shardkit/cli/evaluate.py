"""`shardkit evaluate RUN`: the validation loss of a saved run, on any mesh."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

import shardkit as sk
from shardkit.cli.output import Json, console, write_json
from shardkit.cli.plans import mesh_of, mesh_words
from shardkit.cli.train_options import TrainOptions
from shardkit.cli.training import Run

EXAMPLES = {
    "shardkit evaluate runs/a": "the newest step, on all devices",
    "shardkit evaluate runs/a fsdp=8 --step 200": "another step, on another mesh",
}


@dataclass(frozen=True)
class Options:
    """Options of `shardkit evaluate`."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Directory of checkpoints, from `shardkit train --checkpoint`."""
    mesh: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="AXIS=SIZE ...")] = ("data=-1",)
    """Mesh axes, as for `shardkit train`, whatever mesh the run was trained on."""
    step: int | None = None
    """The step; by default the newest one."""
    data: tuple[Path, ...] = ()
    """Text files or directories of them, of which a part is held out; by default those of the run."""
    batch: int | None = None
    """Global batch size; by default that of the run."""
    length: int | None = None
    """Sequence length; by default that of the run."""
    json: Json = None
    """Write the results to this file, or with - to standard output."""


def evaluate(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Evaluate a saved run on held-out text."""
    for name in ("batch", "length"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"evaluate: --{name} must be at least 1; got {value}. Pass 1 or more.")
    cluster = sk.runtime.initialize()
    here = console(quiet=not cluster.is_master)
    mesh = mesh_of("evaluate", options.mesh, many=cluster.processes > 1)
    saved, trained = saved_run("evaluate", options.run, options.step)
    others: dict[str, Any] = {name: getattr(options, name) for name in ("data", "batch", "length")}
    trained = replace(trained, mesh=options.mesh, **{name: value for name, value in others.items() if value})
    run = Run(trained, mesh)
    like = run.init.abstract(run.params).params  # type: ignore[attr-defined]
    found = run.validation(sk.runtime.load_params(options.run, like, step=saved.step))
    size = sum(x.size for x in jax.tree.leaves(like))
    here.print(f"step {saved.step} of {options.run}; plan: {run.model.plan}; {size:,} parameters")
    here.print(
        f"validation loss {found['loss']:.3f} nats per byte, accuracy {found['accuracy']:.1%}, on held-out text of "
        f"{run.text.source}"
    )
    if options.json and cluster.is_master:
        results = {"step": saved.step, "mesh": mesh_words(options.mesh), "validation_loss": found.pop("loss"), **found}
        write_json(options.json, "evaluate", [results], run=options.run)
    return 0


def saved_run(where: str, directory: Path, step: int | None) -> tuple[sk.runtime.Run, TrainOptions]:
    """The run of a step, by default the newest, and its options, as far as they determine numbers.

    Raises:
        ValueError: there is none, or another program has saved it.
    """
    if sk.runtime.latest_step(directory) is None:
        raise ValueError(
            f"{where}: RUN must be a directory of checkpoints from shardkit train --checkpoint; {directory} has no "
            "finished step. Correct the path."
        )
    with sk.runtime.Checkpoints(directory, read_only=True) as checkpoints:
        run = checkpoints.run(step)
    config: Any = run.config if isinstance(run.config, dict) else {}
    if not {"layers", "dim", "heads", "data"} <= config.keys():
        raise ValueError(
            f"{where}: RUN must be a directory of checkpoints from shardkit train --checkpoint; another program saved "
            f"step {run.step} of {directory}. Read its parameters with shardkit.runtime.load_params."
        )
    known = {field.name: config[field.name] for field in fields(TrainOptions) if field.name in config}
    return run, TrainOptions(**{**known, "data": tuple(map(Path, config["data"])), "init_from": None})
