"""The `shardkit` command: train, evaluate, sample, launch, doctor, lint, audit, aot, draw, soak; a file for each.

Start with `train.py`. Imports everything; nothing imports it.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

_NEEDS = "shardkit: the command needs the extra [cli]; install it with: pip install 'shardkit[cli]'"
_NO_DASHES = "error: launch: the command and its options must come after --. Write for example -- train.py --steps 100."


def main() -> None:
    """Runs `shardkit COMMAND`; a user's mistake ends with a one-sentence error and exit code 2."""
    try:
        try:
            _main()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # the reader of the pipe has closed it: | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at interpreter exit
        sys.exit(128 + signal.SIGPIPE)


def _main() -> None:
    try:
        import rich  # noqa: F401
        import tyro  # noqa: F401
        import uniplot  # noqa: F401
        import yaml  # noqa: F401
    except ImportError:
        sys.exit(_NEEDS)
    from shardkit.cli import aot, audit, doctor, draw, evaluate, launch, lint, sample, soak, train

    commands: dict[str, Any] = {
        "train": train.train,
        "evaluate": evaluate.evaluate,
        "sample": sample.sample,
        "launch": launch.launch,
        "doctor": doctor.doctor,
        "lint": lint.lint,
        "audit": audit.audit,
        "aot": aot.aot,
        "draw": draw.draw,
        "soak": soak.soak,
    }
    try:
        code = _run(commands)
        from shardkit.runtime.cluster.join import finish

        finish(code)
    except KeyboardInterrupt as error:
        _end(error, 130)
    except (ValueError, RuntimeError) as error:
        if not _raised_by_shardkit(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        _end(error, 2)


def _run(commands: dict[str, Any]) -> int:
    import tyro

    try:
        return tyro.extras.subcommand_cli_from_dict(
            commands,
            prog="shardkit",
            description="Explicit collectives for JAX.",
            config=(tyro.conf.OmitArgPrefixes,),
        )
    except SystemExit as ended:
        if ended.code == 2 and sys.argv[1:2] == ["launch"] and "--" not in sys.argv:
            print(_NO_DASHES, file=sys.stderr)
        raise


def _end(error: BaseException, code: int) -> NoReturn:
    from shardkit.runtime.monitor import client

    client.tell_others(error, code)
    sys.exit(code)


def _raised_by_shardkit(error: BaseException) -> bool:
    """Whether shardkit itself raised the error; any other exception is a bug, and its traceback is wanted."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(__file__).parents[1] in Path(frames[-1].filename).parents
