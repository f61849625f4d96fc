"""300 wrong arguments drawn by seed, of functions, methods and what builders return: taken, unclear, or a sentence.

`test_arguments_walk.py` has each wrong value of each parameter's annotation. Here a wrong value is drawn against the
right one: another type, a mesh of other axes, a tree of another structure, nan, nothing.
"""

import collections
import inspect
import math
import random
import re

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import testing
from support import calls, walk
from test_arguments_walk import TAKEN, UNWALKED

pytestmark = pytest.mark.check
DRAWN, SEEDS = 300, (1, 2, 3)
RIGHT = (  # drawn as wrong, and right, beside those of the walk
    r"cost\..*|schedules\.base\.Schedule\.simulate\(.*=(2\.5|10{30})\)|.*\((scatter_from|output|folder|directory)=.*\)",
    r".*\((by|data)=-3\)|.*\.hierarchical\(inner='nowhere'\)|.*\((mesh|plan)=(AbstractMesh|Plan).*\)|.*\(params=3\)|.*emulate\(x=None\)",
)


def more():
    """Methods, and functions that builders return."""
    params, batch, plan = {"w": calls.ones(4, 4)}, calls.ones(8, 4), sk.dp("data")
    init, step = sk.make_train_step(sk.value_and_grad(calls.loss), optax.sgd(0.1), mesh=calls.MESH, plan=plan)
    emulated = testing.emulate(lambda x: jax.lax.psum(x, "data"), {"data": 4}, P("data"), P())

    def trace(state, batch):
        return step.trace(state, batch)

    def abstract(params):
        return init.abstract(params)

    def emulate(x):
        return emulated(x)

    return [
        (trace, {"state": init.abstract(params), "batch": batch}),
        (abstract, {"params": params}),
        (emulate, {"x": batch}),
        (sk.Mean.of, {"values": batch, "weights": batch}),
        (sk.Plan.layouts, {"self": plan, "params": params, "mesh": calls.MESH}),
        (sk.Plan.describe, {"self": plan, "params": params, "mesh": calls.MESH}),
        (sk.Plan.batch_spec, {"self": plan, "mesh": calls.MESH}),
        (sk.algorithms.ring, {"bidirectional": True}),
        (sk.algorithms.hierarchical, {"inner": "model"}),
        (sk.algorithms.bucket, {"bucket_bytes": 1024}),
        (sk.layers.Capacity, {"factor": 1.25, "group": 4}),
        (sk.layers.Dropless, {"dense": True}),
    ]


WRONG = (  # the type of a right value, and wrong ones in its place
    (bool, ["yes", 2, math.nan, [True]]),
    (int, ["3", 2.5, math.nan, -3, [1], {}, 1j, 10**30]),
    (float, ["0.1", math.nan, [0.1], 1j, -math.inf]),
    (str, [3, b"x", ["x"], 1.5]),
    ((Mesh, AbstractMesh), [{"data": 8}, "data", sk.abstract_mesh(other=8), 8]),
    (sk.Plan, ["data", sk.dp("nowhere"), ["data"], 1]),
    (P, ["data", P("nowhere"), P("data", "data"), 3]),
    ((np.ndarray, jax.Array), ["x", ["a"], len, np.array(["a"])]),
    (dict, ["x", {"w": "x"}, 3]),
    (object, ["x", 3]),
)


def wrong(table):
    """(function, right arguments, parameter, wrong value) for each value of `WRONG`."""
    for function, right in table:
        for name, parameter in inspect.signature(function).parameters.items():
            value = right.get(name, parameter.default)
            listed = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if name == "self" or listed or value is None or value is parameter.empty:
                continue
            values = next(values for kind, values in WRONG if isinstance(value, kind))
            optional = parameter.default is None or "None" in str(parameter.annotation)
            for each in [*values, walk.THING, *([] if optional else [None])]:
                yield function, right, name, each


@pytest.fixture(scope="module")
def rows():
    """Every wrong argument that can be drawn, judged; what is compiled ends the call there."""

    def judge(table):
        for function, right, name, value in wrong(table):
            if walk.name_of(function) not in UNWALKED:
                verdict = walk.judged(function, {**right, name: value})
                yield walk.Call(walk.name_of(function), name, walk.told(value), *verdict)

    found = walk.over(judge, calls.builders() + more())
    right = [*(pattern for pattern, _ in TAKEN), *RIGHT]
    return [
        row for row in found if row.verdict != "accepted" or not any(re.fullmatch(each, row.call) for each in right)
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_few_wrong_arguments_are_taken_or_unclear(rows, seed):
    drawn = random.Random(seed).sample(rows, DRAWN)
    count = collections.Counter(row.verdict for row in drawn)
    told = "\n".join(str(row) for row in drawn if row.verdict != "sentence")
    assert count["accepted"] <= DRAWN // 100 and count["raw"] + count["hang"] <= 3 * DRAWN // 100, told


def test_a_method_and_what_a_builder_returned_are_told_as_functions_are(rows):
    """Each of these ended in an error of Python or jax, or was taken."""
    mended = {
        *("trace", "emulate", "plan.Plan.layouts", "plan.Plan.batch_spec", "gradient.Mean.of", "algorithms.bucket")
    }
    found = {row.function: row for row in rows if row.verdict != "sentence" and row.function.endswith((*mended,))}
    assert not found, "\n".join(map(str, found.values()))
