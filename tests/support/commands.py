"""The `shardkit` command in a process of its own, with a small model to train."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.compiling import QUICK

SMALL = ["--layers", "1", "--dim", "32", "--heads", "2", "--length", "32", "--batch", "16", "--evaluate-every", "4"]


def deep(row):
    """A row of the deep tier."""
    return pytest.param(row, marks=pytest.mark.deep)


def environment():
    clean = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC", "JAX_PLATFORMS")}
    return clean | {"COLUMNS": "100", "XLA_FLAGS": QUICK}


def command(*words):
    return [sys.executable, "-m", "shardkit", *map(str, words)]


def rows(file, kind=None):
    """The rows of a kind, by default all, in what `train --json` wrote."""
    found = [json.loads(line) for line in Path(file).read_text().splitlines()]
    return [row for row in found if kind in (None, row["row"])]


def run(*words, code=0, seconds=300):
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=seconds, env=environment())
    assert done.returncode == code, done.stdout + done.stderr
    return done
