"""The rule on collectives in flight together, on schedules of a few instructions and on recorded programs."""

import re
from types import SimpleNamespace

import pytest

from shardkit.analysis.compiled_rules.in_flight import in_flight
from shardkit.analysis.hlo import proto
from shardkit.analysis.hlo.uses import Uses
from support.planted.scheduled import GATHER, REDUCE, RIGHT, SCHEDULED
from support.recorded.record import HERE, load

pytestmark = pytest.mark.check


def findings(*instructions, mesh=None):
    """Those of a schedule; each instruction is (name, opcode, what it reads) and more fields."""
    numbers = {name: number for number, (name, *_) in enumerate(instructions, 1)}
    scheduled = {}
    for name, opcode, operands, fields in instructions:
        reads = tuple(numbers[operand] for operand in operands)
        scheduled[numbers[name]] = proto.Instruction(
            id=numbers[name], name=name, opcode=opcode, operands=reads, shape=proto.Shape(11, (8,)), **fields
        )
    main = proto.Computation(1, "main", len(scheduled), scheduled)
    return check(proto.Module("step", 1, {1: main}, {}), mesh or {"data": 2, "model": 2})


def check(module, mesh):
    return list(in_flight(SimpleNamespace(module=module, uses=Uses(module), mesh=mesh)))


def together(first, second):
    """Two collectives, both in flight before one ends."""
    return (
        ("x", "parameter", (), {}),
        ("a", f"{first[0]}-start", ("x",), first[1]),
        ("b", f"{second[0]}-start", ("x",), second[1]),
        ("a.done", f"{first[0]}-done", ("a",), {}),
        ("b.done", f"{second[0]}-done", ("b",), {}),
    )


# proves N68
@pytest.mark.parametrize("planted", SCHEDULED)
def test_two_that_can_wait_for_each_other_are_named(planted):
    """Alone in reading which collectives a schedule has in flight at one time."""
    [finding] = findings(*together(planted.first, planted.second))
    assert finding.rule == planted.rule
    assert re.search(planted.message, finding.message), finding.message


@pytest.mark.parametrize(("first", "second"), RIGHT)
def test_others_are_not(first, second):
    assert findings(*together(first, second)) == []


def test_one_after_the_other_is_right():
    """Catches a rule that asks what a program has, and not when."""
    x, first, second, first_end, second_end = together(REDUCE, GATHER)
    assert findings(x, first, first_end, second, second_end) == []


def test_a_start_without_an_end():
    [finding] = findings(*together(REDUCE, GATHER)[:2])
    assert finding.message == "all_reduce over 'data', 'model' starts, and has no end in its computation."


@pytest.mark.parametrize("path", sorted(HERE.rglob("*.gz")), ids=lambda path: path.name)
def test_what_compilers_made_is_clean(path):
    _, module = load(path)
    assert check(proto.read(module), {"device": 8}) == []
