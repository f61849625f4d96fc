"""Runs that save, here and in processes of their own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from shardkit.runtime.checkpoint.checkpoints import Checkpoints
from support.jobs import PATH

CHILD = Path(__file__).with_name("checkpoint_child.py")


def save(directory: Any, state: Any, **more: Any) -> None:
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(state, **more)


def restored(directory: Any, target: Any, **options: Any) -> Any:
    """The state and what its run said."""
    with Checkpoints(directory) as checkpoints:
        return checkpoints.restore(target, **options)


def start(tmp_path: Path, **what: Any) -> subprocess.Popen:
    """A run in another process, which saves into `directory` and tells `report` what it saw."""
    with open(tmp_path / "output", "ab") as output:
        options = {"stdout": output, "stderr": output, "env": os.environ | {"PYTHONPATH": PATH}}
        return subprocess.Popen([sys.executable, CHILD, json.dumps(what)], **options)


def wait_until(true: Any, process: Any, tmp_path: Path, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert process.poll() is None, (tmp_path / "output").read_text()
        assert time.monotonic() < end, (tmp_path / "output").read_text()
        time.sleep(0.01)
