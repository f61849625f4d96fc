"""How to install what an optional part needs: the one command that all errors name."""

from __future__ import annotations

from pathlib import Path


def install(extra: str) -> str:
    """The command that adds an extra to this shardkit, with which nothing else of that name is looked for.

    Of a package that is installed, from a clone, a git URL or a wheel, pip takes what is there. A clone that is only on
    the path must be installed first.
    """
    from importlib import metadata  # which takes a third of the time of the command's first line

    try:
        metadata.distribution("shardkit")
    except metadata.PackageNotFoundError:
        return f"pip install -e '{Path(__file__).parents[2]}[{extra}]'"
    return f"pip install 'shardkit[{extra}]'"
