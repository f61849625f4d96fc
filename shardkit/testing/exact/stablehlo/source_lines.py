"""Calls a function as from the lines of the source that an operation of a module came from."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import FunctionType
from typing import Any

# A frame as a location of MLIR shows it: "loss_fn"("/home/me/model.py":12:8).
_FRAME = re.compile(r'"([^"]*)"\("([^"]+)":(\d+)')


def has_frames(location: str) -> bool:
    """Whether a location names a line of the source."""
    return _FRAME.search(location) is not None


def make_caller(location: str) -> Callable[[Callable[[], Any]], Any]:
    """A function that calls another one from the lines of a location, so that jax notes these as its traceback.

    Worked example: for `"loss_fn"("model.py":12:8) at "<module>"("train.py":3:0)` it is a function `<module>` of line 3
    of train.py, which calls a function `loss_fn` of line 12 of model.py, which calls the rule that it is passed.
    """
    caller: Callable[..., Any] = _call
    for name, path, line in _FRAME.findall(location):
        code = _call_next.__code__.replace(
            co_filename=path, co_firstlineno=max(int(line) - 1, 1), co_name=name, co_qualname=name
        )
        caller = FunctionType(code, {"inner": caller})
    return caller


def _call(rule: Callable[[], Any]) -> Any:
    return rule()


def _call_next(rule: Callable[[], Any]) -> Any:
    return inner(rule)  # type: ignore[name-defined]  # noqa: F821, the global of each copy
