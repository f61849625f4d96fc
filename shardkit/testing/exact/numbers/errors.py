"""What ends a run in the field: some are mended by another draw, others are the proof's last word."""

from __future__ import annotations


class RedrawError(Exception):
    """A divisor that is not always zero is zero at one of the points: they are drawn again."""


class TooDeepError(Exception):
    """More nested exps, on the way to a result, than the field has primes."""


class UnknownValueError(Exception):
    """A comparison of a number whose real value is beyond floats, or of a function that has none."""


class UnsupportedError(Exception):
    """A primitive that has no meaning in the field.

    Attributes:
        line: the line of the innermost equation that knows its own.
    """

    line: str = ""
