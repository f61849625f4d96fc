"""Every public function refuses arguments of another kind than its signature says, in one sentence of one form."""

import inspect
import math
import re
from typing import get_type_hints

import numpy as np
import pytest

import shardkit as sk
from shardkit import analysis, collectives, cost, runtime, schedules, testing, viz
from shardkit._typed import _kinds, typed
from shardkit.collectives import compressed, hierarchical, ring

pytestmark = pytest.mark.check
ROOMS = (sk, analysis, collectives, compressed, hierarchical, ring, cost, runtime, schedules, testing, viz)
# Their numbers may be whole floats and NumPy's; tests/cost and tests/schedules have the sentences.
OWN = ("shardkit.cost", "shardkit.schedules")
WRONG = {
    bool: ["none", "False", 0, 1, None, 1.5, [True]],
    int: ["1", 1.5, math.nan, True, None, [1], 1j, np.float32(2)],
    float: ["0.1", math.nan, True, None, [0.1], 1j],
    str: [1, None, True, b"x", ["x"], math.nan],
}
SENTENCE = re.compile(r"[\w.]+: \w+ must be .*; got .*\. (Correct \w+|Choose one of them)\.", re.S)


def public():
    found = {}
    for room in ROOMS:
        for name in getattr(room, "__all__", None) or [name for name in vars(room) if not name.startswith("_")]:
            each = getattr(room, name, None)
            ours = inspect.isfunction(each) and each.__module__.startswith("shardkit.")
            if ours and "._" not in each.__module__:
                found.setdefault(f"{each.__module__}.{each.__name__}", each)
    return found


def judged(function):
    """The parameters that `typed` can judge, with the kinds that each allows."""
    try:
        hints = get_type_hints(function)
    except NameError:  # names that are imported for types alone
        return {}
    kinds = {name: _kinds(hints.get(name)) for name in inspect.signature(function).parameters}
    only = (bool,) if function.__module__.startswith(OWN) else (bool, int, float, str)
    return {name: each for name, each in kinds.items() if each and any(kind in only for kind in each)}


FUNCTIONS = {name: function for name, function in public().items() if judged(function)}


def test_all_of_them_are_walked():
    count = sum(len(judged(function)) for function in FUNCTIONS.values())
    assert len(FUNCTIONS) >= 85 and count >= 165, (len(FUNCTIONS), count)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_of_another_kind_is_refused(name):
    function = FUNCTIONS[name]
    parameters = inspect.signature(function).parameters
    required = {
        each: None
        for each, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    for parameter, kinds in judged(function).items():
        types = [kind for kind in kinds if isinstance(kind, type)]
        allowed = [value for kind in types for value in WRONG[kind]]
        if parameters[parameter].kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            continue
        for value in allowed:
            if any(_fits(value, kind) for kind in kinds):
                continue
            # What comes before it must be right, or is complained of first.
            given = {each: _right(judged(function).get(each)) for each in required} | {parameter: value}
            with pytest.raises((TypeError, ValueError)) as error:
                function(**given)
            assert SENTENCE.fullmatch(str(error.value)) and f" {parameter} must be" in str(error.value), (given, error)


def _fits(value, kind):
    if kind is None:
        return value is None
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    return type(value) is kind if isinstance(kind, type) else value == kind


def _right(kinds):
    for kind in kinds or (None,):
        if kind in (bool, int, float, str):
            return {bool: False, int: 1, float: 0.5, str: "x"}[kind]
        return kind
    return None


def test_what_is_left_to_the_function():
    @typed
    def some(a: int, b: "float | None" = None, *c: int, d: bool = False, **e: int) -> None:
        """Nothing."""

    some(np.int32(1), np.float64(2), 3, d=np.bool_(True), f=4)
    some(1, math.inf)
    with pytest.raises(TypeError, match="missing 1 required"):
        some()
    for call, words in (
        (lambda: some(1.0), "some: a must be a whole number; got 1.0. Correct a."),
        (lambda: some(1, "x"), "some: b must be a number or None; got 'x'. Correct b."),
        (lambda: some(1, None, "3"), "some: c must be a whole number; got '3'. Correct c."),
        (lambda: some(1, d=1), "some: d must be True or False; got 1. Correct d."),
        (lambda: some(1, f="4"), "some: f must be a whole number; got '4'. Correct f."),
    ):
        with pytest.raises(TypeError) as error:
            call()
        assert str(error.value) == words
