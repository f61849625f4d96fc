"""The one look of all pictures: colors, hatches, text, light and dark, and the file that a picture is written to.

Colors are those of Okabe and Ito, which the color-blind tell apart. An .svg is light or dark as its reader's system is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shardkit._arguments.extras import install
from shardkit._arguments.files import open_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RGB = tuple[float, float, float]

# No text on a color is PAPER or INK, which change places in the dark.
PAPER = "#ffffff"
INK = "#1b1f24"
MUTED = "#57606a"
GRID = "#dcdfe3"
AREA = "#9ea4ab"
# Of the ops of a pipeline; they also differ in grayscale.
OPS = {
    "F": (0.0, 0.267, 0.533),
    "B": (0.835, 0.369, 0.0),
    "I": (0.902, 0.624, 0.0),
    "W": (0.0, 0.62, 0.451),
}
GREY = (0.35, 0.35, 0.35)
_LIGHTEST = 0.5

# What a color of the light picture is in the dark one; all others stay.
DARK = {
    PAPER: "#14181d",
    INK: "#e8eaed",
    MUTED: "#a3acb6",
    GRID: "#353c44",
    "#004488": "#2f78c4",
}

# Points: a title, text, and the smallest text beside and on marks.
TITLE = 10.5
TEXT = 8.0
SMALL = 7.0
LETTER = 0.075  # inches, of text
_SUFFIXES = (".png", ".svg")
_RC: dict[str, Any] = {
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Helvetica", "Arial", "sans-serif"],
    "font.size": TEXT,
    "text.color": INK,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": TEXT + 1,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": SMALL,
    "lines.linewidth": 1.4,
    # Text stays text, and a fixed salt makes files reproducible.
    "svg.fonttype": "none",
    "svg.hashsalt": "shardkit",
}


@contextmanager
def look() -> Iterator[None]:
    """Draws in the one look, whatever the caller's settings of matplotlib are; a RuntimeError without matplotlib."""
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError:
        raise RuntimeError(
            f"viz: pictures need matplotlib, which is not installed. Install it with: {install('viz')}"
        ) from None
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(cast(Any, _RC))
        yield


def make_figure(width: float, height: float, description: str = "") -> Figure:
    """An empty figure of this size in inches; its description is read out to those who cannot see it."""
    from matplotlib.figure import Figure

    class Picture(Figure):
        """A figure that notebooks display without pyplot, and that is saved in the one look."""

        def savefig(self, *args: Any, **options: Any) -> None:
            with look():
                super().savefig(*args, **options)

        def _repr_png_(self) -> bytes:
            png = BytesIO()
            self.savefig(png, format="png")
            return png.getvalue()

    return Picture(figsize=(width, height), dpi=150, label=description)


def write_heading(picture: Figure, title: str, note: str) -> None:
    """Writes the title of a figure and a line of notes below it."""
    width, height = picture.get_size_inches()
    left = 0.15 / width
    picture.text(left, 1 - 0.26 / height, title, size=TITLE, weight="bold", va="center")
    picture.text(left, 1 - 0.47 / height, note, color=MUTED, va="center")


def shade(colour: RGB, chunk: int, chunks: int) -> RGB:
    """The color for the first chunk, half white for the last."""
    white = _LIGHTEST * chunk / max(chunks - 1, 1)
    red, green, blue = (value + white * (1 - value) for value in colour)
    return red, green, blue


def ramp(number: int, count: int) -> RGB:
    """The color of one of `count` things in order: from dark blue to yellow, darker before lighter in grayscale too."""
    from matplotlib import colormaps

    red, green, blue, _ = colormaps["cividis"](number / max(count - 1, 1))
    return red, green, blue


def text_on(colour: RGB) -> str:
    """Black or white, whichever has more contrast on the color; neither changes in the dark."""
    red, green, blue = map(_to_linear, colour)
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    # The contrast of WCAG: 0.05 is the light that a screen reflects, and 1 the luminance of white.
    contrast_of_white = (1 + 0.05) / (luminance + 0.05)
    contrast_of_black = (luminance + 0.05) / 0.05
    if contrast_of_white > contrast_of_black:
        return "#fefefe"
    return "#000000"


def _to_linear(value: float) -> float:
    """A channel of sRGB as light, as WCAG defines it."""
    if value <= 0.04045:
        return value / 12.92
    return ((value + 0.055) / 1.055) ** 2.4


def check_file(where: str, output: str | os.PathLike[str] | None) -> Path | None:
    """The path of a picture, if it is to be written; refuses other kinds of files than .png and .svg."""
    if output is None:
        return None
    file = Path(output)
    if file.suffix.lower() not in _SUFFIXES:
        raise ValueError(
            f"{where}: the picture must be a .png or .svg file; got {file.name!r}. Pass for example 'picture.svg'."
        )
    return file


def save(picture: Figure, file: Path | None) -> None:
    """Writes a picture to its file, if it has one; the same picture gives the same bytes."""
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix.lower() == ".svg":
        with open(file, "w", encoding="utf-8", opener=open_file) as out:
            out.write(svg_of(picture))
    else:
        with open(file, "wb", opener=open_file) as out:
            picture.savefig(out, format="png")


def _escape(match: re.Match[str]) -> str:
    """A character as an attribute of an .svg may have it: of "&" it is "&#38;"."""
    return f"&#{ord(match[0])};"


def svg_of(picture: Figure) -> str:
    """A picture as the text of an .svg without a date, dark where its reader's system is."""
    text = StringIO()
    picture.savefig(text, format="svg", metadata={"Date": None, "Creator": "shardkit"})
    label = re.sub(r"[&<>\"]", _escape, str(picture.get_label()))
    rules = ""
    for light, dark in DARK.items():
        for name in ("fill", "stroke"):
            # matplotlib writes a color as part of a style, or as an attribute.
            rules += f'.shardkit [style*="{name}: {light}"],.shardkit [{name}="{light}"]{{{name}:{dark} !important}}'
    head = f'<svg class="shardkit" role="img" aria-label="{label}" '
    style = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>\n <defs>"
    return text.getvalue().replace("<svg ", head, 1).replace("<defs>", style, 1)
