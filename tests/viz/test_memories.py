"""Memory by kind: bars that add up to what the value itself says."""

from types import SimpleNamespace

import numpy as np
import pytest

from shardkit import cost, viz
from shardkit.analysis.hlo.memory import Memory
from shardkit.analysis.hlo.report import Report
from shardkit.analysis.jaxpr.census import Census
from support.refusals import refused

pytestmark = pytest.mark.check
HELD = Memory(argument=1000, output=700, alias=600, temp=400, generated_code=50, host_temp=0)


def report(memory=HELD, limit=4096):
    return Report("v5e:2x4", {"data": 8}, memory is not None, "", memory, limit, Census(()), 0.0)


def bars(picture):
    return {patch.get_gid(): patch.get_width() for patch in picture.axes[0].patches if patch.get_gid()}


def test_the_parts_of_a_report_add_up_to_its_peak_beside_a_limit_near_or_far():
    """It alone finds a result counted twice in the buffer of a donated argument."""
    found = bars(viz.memory(report()))
    assert found == {", arguments": 1000, ", results": 100, ", temporaries": 400, ", program": 50}
    assert sum(found.values()) == HELD.peak
    limit = next(line for line in viz.memory(report()).axes[0].lines if line.get_gid() == "limit")
    assert list(limit.get_xdata()) == [4096, 4096]
    assert viz.memory(report()).texts[1].get_text() == "1.514 KiB of 4 KiB"
    # It alone finds bars that nobody can see beside the memory of a whole chip.
    picture = viz.memory(report(limit=2**34))
    assert not [line for line in picture.axes[0].lines if line.get_gid() == "limit"]
    assert picture.axes[0].get_xlim()[1] == HELD.peak
    assert picture.texts[1].get_text() == "1.514 KiB of 16 GiB"


def test_the_state_is_told_apart_from_the_other_arguments():
    state = SimpleNamespace(params={"w": np.ones(50, np.float32)}, opt_state=[np.ones(100, np.float32)])
    found = bars(viz.memory({"fsdp": report()}, state=state))
    assert found["fsdp, parameters"] == 200 and found["fsdp, optimizer"] == 400 and found["fsdp, arguments"] == 400
    assert sum(found.values()) == HELD.peak


def test_stages_of_zero_by_kind_and_kinds_of_ones_own():
    stages = {f"ZeRO-{stage}": cost.zero_breakdown(1e9, 8, stage) for stage in range(4)}
    picture = viz.memory(stages, limit=16 * 2**30)
    found = bars(picture)
    for name, each in stages.items():
        assert {kind: found[f"{name}, {kind}"] for kind in each._fields} == each._asdict()
    assert {patch.get_hatch() for patch in picture.axes[0].patches if patch.get_gid()} == {"", "////", "||||"}
    assert [label.get_text() for label in picture.axes[0].get_yticklabels()] == list(stages)
    assert bars(viz.memory({"parameters": 3, "cache": 2.5})) == {", parameters": 3, ", cache": 2.5}


def test_what_is_no_memory_is_refused():
    assert refused(lambda: viz.memory({"a": "much"}), TypeError) == (
        "viz.memory: memory must be a report, a ZeroMemory, bytes by name, or a mapping of names to these; got 'much'. "
        "Pass for example sk.cost.zero_breakdown(1e9, 8, stage=1)."
    )
    assert refused(lambda: viz.memory(report(), state={"w": 1}), TypeError) == (
        "viz.memory: state must be a TrainState; got {'w': 1}. Pass init.abstract(params), or leave it out."
    )
    assert refused(lambda: viz.memory(report(memory=None))) == (
        "viz.memory: the program must be compiled; got a report of one that does not fit v5e:2x4, of which the "
        "compiler gives no parts. Pass a report with fits=True."
    )
