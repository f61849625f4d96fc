"""What all pictures share: a figure that notebooks show, and the file it is written to."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SUFFIXES = (".png", ".svg")


def blank(width: float, height: float) -> Figure:
    """An empty figure of this size in inches.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError(
            "viz: pictures need matplotlib, which is not installed. Install it with: pip install 'shardkit[viz]'"
        ) from None

    class Picture(Figure):
        """A figure that notebooks display without pyplot."""

        def _repr_png_(self) -> bytes:
            png = BytesIO()
            self.savefig(png, format="png")
            return png.getvalue()

    return Picture(figsize=(width, height), dpi=150)


def file_of(where: str, file: str | Path) -> Path:
    """The path of a picture; refuses other kinds of files than .png and .svg."""
    file = Path(file)
    if file.suffix.lower() not in _SUFFIXES:
        raise ValueError(
            f"{where}: the picture must be a .png or .svg file; got {file.name!r}. Pass for example 'picture.svg'."
        )
    return file


def save(picture: Figure, file: Path) -> None:
    """Writes a picture; the same picture gives the same bytes."""
    import matplotlib

    file.parent.mkdir(parents=True, exist_ok=True)
    # Text stays text; a fixed salt and no date make files reproducible.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "shardkit"}):
        picture.savefig(file, metadata={"Date": None} if file.suffix.lower() == ".svg" else None)
