"""The `shardkit` command in a process of its own."""

import os
import subprocess
import sys

import pytest

from support.compiling import QUICK


def deep(row):
    """A row of the deep tier."""
    return pytest.param(row, marks=pytest.mark.deep)


def environment():
    clean = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC", "JAX_PLATFORMS")}
    return clean | {"COLUMNS": "100", "XLA_FLAGS": QUICK}


def command(*words):
    return [sys.executable, "-m", "shardkit", *map(str, words)]


def run(*words, code=0, seconds=300):
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=seconds, env=environment())
    assert done.returncode == code, done.stdout + done.stderr
    return done
