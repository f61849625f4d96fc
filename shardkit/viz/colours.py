"""Colors that are safe for color blindness."""

from __future__ import annotations

RGB = tuple[float, float, float]

# Four colors of a color-blind-safe palette that also differ in grayscale.
OPS = {"F": (0.0, 0.267, 0.533), "B": (0.835, 0.369, 0.0), "I": (0.902, 0.624, 0.0), "W": (0.0, 0.62, 0.451)}
GREY = (0.35, 0.35, 0.35)
_LIGHTEST = 0.5


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
    """Black or white, whichever has more contrast on the color."""
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in colour)
    light = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "white" if 1.05 / (light + 0.05) > (light + 0.05) / 0.05 else "black"
