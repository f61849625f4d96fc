"""A process on one of the hosts of `namespaces.py`: `python -m shardkit.bench.throttle_child FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from shardkit.bench import throttle

if __name__ == "__main__":
    throttle.work(Path(sys.argv[1]))
