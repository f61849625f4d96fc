"""What must be refused in just these words, and with an error of just this kind."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from shardkit._jax.compat import UnboundAxisError


@contextmanager
def raises(kind: type[Exception], message: str) -> Iterator[None]:
    """What is done within raises an error of this kind, with just this message."""
    with pytest.raises(kind) as error:
        yield
    assert (type(error.value), str(error.value)) == (kind, message)


def refused(call: Callable[[], Any], kind: type[Exception] = ValueError) -> str:
    """What a call is refused with."""
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


def value_error(message: str):
    """The same of a ValueError."""
    return raises(ValueError, message)


def unbound_axis(message: str):
    """The same of a collective over an axis that nothing binds."""
    return raises(UnboundAxisError, message)


def type_error(message: str):
    """The same of a TypeError."""
    return raises(TypeError, message)


def refusals(values: dict[str, Any], types: dict[str, Any]) -> list[tuple[type[Exception], str, Any]]:
    """The rows of two tables, message: what is refused with it; of wrong values, and of wrong types."""
    tables = ((ValueError, values), (TypeError, types))
    return [(kind, message, refused) for kind, table in tables for message, refused in table.items()]
