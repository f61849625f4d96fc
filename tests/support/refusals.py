"""What must be refused in just these words; two names, because a wrong type must be told from a wrong value."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def _says(kind: type[Exception], message: str) -> Iterator[None]:
    with pytest.raises(kind) as error:
        yield
    assert str(error.value) == message


def value_error(message: str):
    """What is done within raises a ValueError of just this message."""
    return _says(ValueError, message)


def type_error(message: str):
    """The same of a TypeError."""
    return _says(TypeError, message)
