"""The `shardkit` command in a process of its own, with a small model to train."""

import os
import subprocess
import sys

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


def run(*words, code=0):
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=300, env=environment())
    assert done.returncode == code, done.stdout + done.stderr
    return done
