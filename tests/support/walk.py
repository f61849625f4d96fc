"""Every parameter of every public function with every wrong value of its kind: what is said, by whom."""

import inspect
import math
import re
import signal
import traceback
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax._src.interpreters import pxla
from jax.sharding import PartitionSpec as P

import shardkit
from support import calls

HOUSE = str(Path(shardkit.__file__).parent)
SENTENCE = re.compile(r"[A-Za-z_][\w.]*(\([^)]*\))?: .+[.?]", re.S)


class Thing:
    """No number, no array, no function."""

    def __repr__(self):
        return "<Thing>"


class Reached(BaseException):
    """A call came as far as compiling or starting something: its arguments were taken in earnest."""


class Late(BaseException):
    """A call that takes longer than it may."""


def raising(*_, **__):
    raise Reached


def late(*_):
    raise Late


THING, NAN, HUGE = Thing(), math.nan, 10**30
RECORD = np.zeros(2, [("a", "f4")])  # an array of fields, no numbers
ODD = [RECORD, np.array(3.0), jax.ShapeDtypeStruct((8, 4), np.float32)]
WRONG = {
    "bool": [None, "yes", 0, 1.5, [True], THING],
    "whole": [None, "1", 1.5, NAN, math.inf, True, [1], -1, 0, HUGE, THING],
    "number": [None, "0.1", NAN, math.inf, 10**400, -1.0, 0.0, True, [0.1], 1j, THING],
    "text": [None, 1, 1.5, True, b"x", ["x"], THING, "", "nothing of the kind"],
    "axis": [None, 1, 1.5, "", "nowhere", (), [], ("data", "data"), ["data", 1], ("data", "nowhere"), {}, NAN, THING],
    "dim": [None, "0", 1.5, NAN, True, [0], 7, -8, HUGE, THING],
    "array": [None, "x", ["a", "b"], 1.5, {}, (), np.ones((2,) * 6, np.float32), np.array(["a"]), len, THING, *ODD],
    "tree": [None, "x", ["a", "b"], {"w": "x"}, np.array(["a"]), np.array([None]), {1: THING}, len, THING, RECORD],
    "key": [None, "x", 0, 1.5, np.ones(3, np.float32), np.ones(3, np.uint32), {}, THING],
    "mesh": [None, "data", 8, {}, {"data": 8}, len, THING],
    "plan": [None, "data", 1, {}, ["data"], len, THING],
    "spec": [None, "data", 1, len, THING, P("nowhere"), P("data", "data"), P(None, None, "data"), P(1)],
    "function": [None, "f", 1, {}, [len], THING],
    "optimizer": [None, "adam", 1, len, {}, THING],
    "path": [None, 1, 1.5, ["x"], len, THING],
    "shape": [None, "84", 8, (-1, 4), (1.5, 4), (NAN,), ("8",), (), THING],
    "wholes": [None, "84", 8, (-1, 4), (1.5, 4), (NAN, 1), ("8", 1), (), (True, True), (HUGE, 1), THING],
    "sizes": [None, "x", 8, {1: 2}, {}, *({"data": size} for size in (0, -2, 1.5, "2", HUGE)), THING],
    "schedule": [None, "gpipe", 1, {}, len, THING],
    "dtype": [None, "nothing", 1, "int64", object, THING],
    "sequence": [None, 1, THING, [None], "x"],
    "names": [None, 1, THING, [None], [1], "x", ()],
    "record": [None, "x", 1, {}, len, THING],
    "rules": [None, "w", 1, {"w": 1}, {"w": P("nowhere")}, THING],
    "mapping": [None, "x", 1, [1], THING],
}
# Parameters whose annotation does not tell what they are.
NAMED = {
    "dim": "dim", "split_dim": "dim", "concat_dim": "dim", "dims": "dim",
    "optimizer": "optimizer", "specs": "spec", "spec": "spec", "in_specs": "spec", "out_specs": "spec",
    "param_specs": "spec", "batch_spec": "spec", "key": "key", "keys": "key", "keys_b": "key",
    "dtype": "dtype", "shape": "shape", "sizes": "wholes", "mesh_sizes": "sizes", "fast": "sizes", "slow": "sizes",
    "rules": "rules", "spread": "rules", "muon_weight_dimension_numbers": "rules",
    "grad_fn": "function", "reference_grad_fn": "function", "step": "function",
    "reference": "function", "loss_fn": "function", "args": "sequence", "batches": "sequence",
    "rows": "sequence", "laws": "sequence",
    "stages": "sequence", "meshes": "sequence", "experts": "tree", "config": "record", "axes": "record",
    "model": "record", "layout": "record", "chip": "record", "logical_axes": "mapping", "factors": "mapping",
    "command": "names", "layerwise": "names", "flags": "names", "dtypes": "names", "names": "names", "ignore": "names",
    "routing": "record", "devices": "sequence", "shards": "sequence", "folder": "path", "directory": "path",
    "file": "path", "output": "path", "candidates": "sequence", "thing": "tree", "source": "sequence",
    "param": "dtype", "compute": "dtype", "reduce": "dtype", "master": "dtype", "axis_types": "record",
    "peak": "number", "w": "array", "w_Df": "array", "residual": "tree", "text": "text",
    "loss_scale": "number", "layer_fn": "function", "expert_fn": "function", "pairs": "sequence", "plans": "plan",
}  # fmt: skip
BY_HINT = [
    (r"bool", "bool"), (r"int", "whole"), (r"float", "number"), (r"str", "text"), (r"Axis", "axis"),
    (r"jax\.Array", "array"), (r"Mesh", "mesh"), (r"Plan", "plan"), (r"Schedule", "schedule"),
    (r"Callable.*|Piece", "function"), (r"Literal.*|Op|Impl|Order|Mode|Uneven|Remat", "text"), (r"Any", "tree"),
    (r"Sequence\[int\]|tuple\[int, \.\.\.\]", "wholes"), (r"Mapping.*", "mapping"),
    (r"Sequence.*|Iterable.*", "sequence"),
]  # fmt: skip


class Call(NamedTuple):
    """One wrong value, and what came of it."""

    function: str
    parameter: str
    value: str
    verdict: str
    said: str

    @property
    def call(self):
        return f"{self.function}({self.parameter}={self.value})"

    def __str__(self):
        return f"{self.verdict:8} {self.call}: {self.said}"


def name_of(function):
    room = function.__module__.removeprefix("shardkit.").removeprefix("support.")
    qualified = getattr(function, "__qualname__", type(function).__qualname__)
    name = qualified if "<" not in qualified else function.__name__
    return f"{room}.{name}"


def kind_of(name, parameter):
    """The kind of a parameter's wrong values, and whether None is right."""
    hint = parameter.annotation
    hint = str(getattr(hint, "__forward_arg__", hint)) if hint is not parameter.empty else "Any"
    parts = [part.strip() for part in re.split(r"\|(?![^\[]*\])", hint)]
    optional = "None" in parts or parameter.default is None
    first = next((part for part in parts if part != "None"), "Any")
    if first in ("bool", "float") or (first in ("int", "str") and NAMED.get(name, "sequence") == "sequence"):
        return BY_HINT[[h for h, _ in BY_HINT].index(first)][1], optional
    if parameter.kind is parameter.VAR_KEYWORD:
        return "sizes", False
    if name == "axes" and first == "Axis":
        return "axis", optional
    if name in NAMED:
        return NAMED[name], optional
    for pattern, kind in BY_HINT:
        if re.fullmatch(pattern, first):
            return kind, optional
    return "tree", optional


def parameters_of(function):
    signature = inspect.signature(function)
    return {n: p for n, p in signature.parameters.items() if n != "self" and not n.startswith("_")}


def told(value):
    text = repr(value)
    return text if len(text) < 60 else f"{type(value).__name__} {getattr(value, 'shape', '')}"


def wrong_calls(function, valid):
    """(parameter, value, arguments) for each wrong value of each parameter."""
    for name, parameter in parameters_of(function).items():
        if parameter.kind is parameter.VAR_KEYWORD and name not in valid:
            continue
        if parameter.kind is parameter.VAR_POSITIONAL and name not in ("plans", "rows"):
            continue  # what is handed on to the user's own function
        kind, optional = kind_of(name, parameter)
        for value in WRONG[kind]:
            if value is None and optional:
                continue
            if parameter.kind is parameter.VAR_KEYWORD and not (isinstance(value, dict) and 1 not in value):
                continue  # what Python itself refuses
            yield name, value, {**valid, name: value}


def invoke(function, given):
    args, kwargs = [], {}
    parameters = inspect.signature(function).parameters
    listed = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    for name, value in given.items():
        kind = parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            kwargs |= value
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            args += list(value) if isinstance(value, tuple | list) else [value]
        elif listed and kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            args.append(value)
        else:
            kwargs[name] = value
    result = function(*args, **kwargs)
    return next(result, None) if inspect.isgenerator(result) else result


def judged(function, given):
    """Verdict of a call, and what it said."""
    signal.setitimer(signal.ITIMER_REAL, 5, 1)
    try:
        result = invoke(function, given)
    except Reached:
        return "accepted", "came as far as compiling or starting"
    except Late:
        return "hang", ""
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        text = " ".join(str(error).split())
        ours = frames[-1].filename.startswith(HOUSE)
        right = isinstance(error, TypeError | ValueError | RuntimeError)
        if right and ours and SENTENCE.fullmatch(str(error)):
            return "sentence", text
        at = next((f for f in reversed(frames) if f.filename.startswith(HOUSE)), frames[-1])
        return "raw", f"{type(error).__name__} at {Path(at.filename).name}:{at.lineno}: {text[:150]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "accepted", told(result)


def walked(table):
    """Each parameter of each call with each wrong value of its kind, all others as they were."""
    for function, valid in table:
        for name, value, given in wrong_calls(function, valid):
            yield Call(name_of(function), name, told(value), *judged(function, given))


def inside_shard_map(function):
    """What a function lists where the kernels are called."""
    found = []

    def kernel():
        found.extend(function())
        return jax.numpy.zeros(())

    jax.eval_shape(jax.shard_map(kernel, mesh=calls.MESH, in_specs=(), out_specs=P()))
    return found


def over_all(outside):
    """The walk over all kernels, and over functions outside of them.

    What is compiled or started ends the call there: its arguments have been taken.
    """
    filtering, before = jax.config.jax_traceback_filtering, signal.signal(signal.SIGALRM, late)
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pxla.MeshComputation, "compile", raising)
            patch.setattr("subprocess.Popen", raising)
            for name in ("JAX_COORDINATOR_ADDRESS", "WORLD_SIZE"):
                patch.delenv(name, raising=False)
            return [*inside_shard_map(lambda: walked(calls.kernels())), *walked(outside)]
    finally:
        signal.signal(signal.SIGALRM, before)
        jax.config.update("jax_traceback_filtering", filtering)
