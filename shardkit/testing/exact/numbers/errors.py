"""What ends a run in the field: after some of these another draw may succeed, after others none can."""

from __future__ import annotations


class RedrawError(Exception):
    """A divisor that is not always zero is zero at one of the points: they are drawn again."""


class TooDeepError(Exception):
    """More nested exps, on the way to a result, than the field has primes."""


class NestedLogarithmsError(Exception):
    """More logarithms that became numbers, one of another, than `Settings.log_depth`."""


class UnknownValueError(Exception):
    """A comparison of a number whose real value is beyond floats, or of a function that has none."""


# With other numbers, other inputs or more primes a result may have a value.
NO_VALUE = (RedrawError, TooDeepError, NestedLogarithmsError, UnknownValueError)


class CollectiveError(Exception):
    """A collective that the devices of a mesh cannot do together: some wait for ever, or write what others write."""


class UnsupportedError(Exception):
    """A primitive that has no meaning in the field.

    Attributes:
        line: the line of the innermost equation that knows its own.
    """

    line: str = ""
