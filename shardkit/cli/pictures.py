"""`--output picture.svg` of commands: the file of a picture, refused before a compiler takes its minutes."""

from __future__ import annotations

from pathlib import Path

from shardkit.viz.style import file_of, look


def check_picture(where: str, output: Path | None) -> None:
    """Refuses what is no .png or .svg file, and a picture without matplotlib.

    Raises:
        ValueError: another kind of file.
        RuntimeError: matplotlib is not installed.
    """
    if file_of(where, output) is not None:
        with look():
            pass
