"""Checks of arguments against the annotations of a signature, with errors of one sentence."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, TypeVar, get_type_hints

import numpy as np

from shardkit._arguments.checks import either
from shardkit._arguments.kinds import NAMES, Kind, is_whole, kinds_of, short

F = TypeVar("F", bound=Callable[..., Any])
_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a string"}
_EXAMPLES = {bool: "True", int: "1", float: "1.0", str: "'...'"}
_HUGE = 2**63


def typed(fn: F, where: str = "", only: type | None = None) -> F:
    """Refuses arguments that do not match their annotations, before the function is called.

    Checks bool, int, float, str, Literal and None (a string is truthy, nan passes every comparison and True equals 1,
    so that Python would accept them silently), the kinds of `kinds.py` (arrays, axes, meshes, plans, keys, functions,
    paths, sequences), and unions of them; any other annotation is not checked. Whole numbers must be below 2**63, which
    jax can represent; other ranges are checked by the function. `where` is the function's name in errors; `only`
    restricts the check to one kind.

    Raises:
        TypeError: from the call: "function: argument must be a whole number; got 1.5. Pass for example argument=1."
        ValueError: likewise, for nan, and for a string that is none of the choices.
    """
    signature = inspect.signature(fn)
    name = where or (fn.__qualname__.split(".")[-2] if fn.__name__ == "__init__" else fn.__name__)

    @functools.cache
    def kinds() -> Mapping[str, tuple[Any, ...]]:
        hints = get_type_hints(fn, include_extras=True)
        found = {each: kinds_of(hints.get(each, Any)) for each in signature.parameters}
        return {each: kinds for each, kinds in found.items() if kinds and only in (None, *kinds)}

    @functools.wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:  # raised by Python
            return fn(*args, **kwargs)
        for each, allowed in kinds().items():
            several = signature.parameters[each].kind
            if several is inspect.Parameter.VAR_KEYWORD:
                for key, value in given.get(each, {}).items():
                    check_kind(name, key, value, allowed)
            elif several is inspect.Parameter.VAR_POSITIONAL:
                for value in given.get(each, ()):
                    check_kind(name, each, value, allowed)
            elif each in given:
                check_kind(name, each, given[each], allowed)
        return fn(*args, **kwargs)

    return checked  # type: ignore[return-value]


def check_fields(options: Any) -> None:
    """Refuses fields of a dataclass, or of a NamedTuple, that do not match their annotations."""
    for name, hint in get_type_hints(type(options), include_extras=True).items():
        if allowed := kinds_of(hint):
            check_kind(type(options).__name__, name, getattr(options, name), allowed)


def check_kind(where: str, name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Refuses a value that is of none of these kinds: types of `_WORDS`, Kinds, None, or choices."""
    if any(_is(value, kind) for kind in allowed):
        if is_whole(value) and abs(int(value)) >= _HUGE:
            raise ValueError(f"{where}: {name} must be a whole number below 2**63; got {value}. Lower it.")
        return
    kinds = [kind for kind in allowed if isinstance(kind, Kind)]
    choices = [kind for kind in allowed if not isinstance(kind, type | Kind) and kind is not None]
    words = [_WORDS[kind] for kind in allowed if isinstance(kind, type)] + [repr(choice) for choice in choices]
    words += [kind.words for kind in kinds] + ["None"] * (None in allowed)
    rule = either(list(dict.fromkeys(words)))
    of_its_kind = (choices and isinstance(value, str)) or (isinstance(value, float) and math.isnan(value))
    error = ValueError if of_its_kind else TypeError
    remedy = kinds[0].remedy if kinds else f"Pass for example {name}={_EXAMPLES.get(allowed[0], '...')}"
    if choices:
        remedy = f"Pass for example {name}={choices[0]!r}"
    if NAMES in kinds and isinstance(value, str):
        remedy = f"Write {name}=({value!r},)"
    told = kinds[0].told(value) if kinds and kinds[0].told is not repr else ""
    raise error(f"{where}: {name} must be {rule}; got {told if 0 < len(told) <= 120 else short(value)}. {remedy}.")


def _is(value: Any, kind: Any) -> bool:
    if isinstance(kind, Kind):
        return kind.test(value)
    if kind is bool:
        return isinstance(value, bool | np.bool_)
    if kind is int:
        return is_whole(value)
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)
    if kind is str:
        return isinstance(value, str)
    return value is None if kind is None else type(value) is type(kind) and bool(value == kind)
