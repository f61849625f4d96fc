"""A run that `shardkit train` has saved: its options, and the record of a step."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import shardkit as sk
from shardkit.cli.train import Options


def saved_run(where: str, directory: Path, step: int | None) -> tuple[sk.runtime.Run, Options]:
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
    known = {field.name: config[field.name] for field in fields(Options) if field.name in config}
    return run, Options(**{**known, "data": tuple(map(Path, config["data"])), "init_from": None})
