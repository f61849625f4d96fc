"""The `shardkit` command: train, doctor, lint, aot, draw, soak."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

_NEEDS = "shardkit: the command needs the extra [cli]; install it with: pip install 'shardkit[cli]'"


def main() -> None:
    """Runs `shardkit COMMAND`; a mistake in what was asked ends with one sentence and exit code 2."""
    try:
        import rich  # noqa: F401
        import tyro
        import uniplot  # noqa: F401
    except ImportError:
        sys.exit(_NEEDS)
    from shardkit.cli import aot, doctor, draw, lint, soak, train

    commands: dict[str, Any] = {
        "train": train.train,
        "doctor": doctor.doctor,
        "lint": lint.lint,
        "aot": aot.aot,
        "draw": draw.draw,
        "soak": soak.soak,
    }
    try:
        sys.exit(
            tyro.extras.subcommand_cli_from_dict(
                commands,
                prog="shardkit",
                description="Explicit collectives for JAX.",
                config=(tyro.conf.OmitArgPrefixes,),
            )
        )
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, RuntimeError) as error:
        if not _raised_by_shardkit(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _raised_by_shardkit(error: BaseException) -> bool:
    """Whether the message is one of ours; any other exception is a bug, and its traceback is wanted."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(__file__).parents[1] in Path(frames[-1].filename).parents
