"""Optimized modules with one edit, as compilers make mistakes: those that change a result are refuted, with a line.

`python tests/support/edits/run.py --count 100` prints the table of kinds.
"""

import jax
import numpy as np
import pytest

from shardkit.testing.exact.changed_run import ChangedRun, Goal
from support.edits.kinds import KINDS, ROUNDED
from support.edits.programs import PROGRAMS
from support.edits.verdicts import Edit, count_sites, draw_edits, judge

pytestmark = pytest.mark.optimized

# A small program of each kind of mistake that compilers made: a sum beside a reduce-scatter (xla#40034), groups.
QUICK = [
    Edit("fsdp", "a sum dropped beside a reduce-scatter", 0),
    Edit("tp", "groups of wrong devices", 0),
    Edit("matmul", "a transposed dot", 0),
    Edit("attention", "a transposed dot", 0),  # which the compiler has left without a line
    Edit("ring", "a wrong trip count", 0),  # whose values stand at other lines than the loop
]
COUNT = 100
# Of the edits that change results, so many are named by their line at least: 82 of 100 are as the default tier
# compiles, and 78 as users compile. 0.9 is the aim.
NAMED = 0.75


@pytest.mark.parametrize("edit", QUICK, ids=lambda edit: f"{edit.program}, {edit.kind}")
def test_a_mistake_of_a_compiler_is_refuted_by_its_line(edit):
    """Alone in holding that a wrong instruction is found, not only a wrong result."""
    verdict = judge(edit)
    assert verdict.changes and verdict.outcome == "refuted", verdict.message
    assert verdict.is_named, verdict.message


def test_rounding_is_said_and_is_no_difference():
    verdict = judge(Edit("tp", ROUNDED, 0))
    assert verdict.outcome == "proved", verdict.message
    assert "assumed: that it rounds to bfloat16, first at programs.py:" in verdict.message


def test_a_repaired_loop_that_goes_on_ends():
    """A repair of what ends a loop let it go through all integers: the search for a line took hours."""
    run = ChangedRun({}, {}, Goal((0, "", 0), 0, None), 2)
    equation = jax.make_jaxpr(jax.numpy.sin)(1.0).eqns[0]
    results = []

    def repeat(field, seen):
        while len(results) < 9:
            seen(equation, [np.ones(1)], [np.ones(1)], {}, "")
            results.append(len(results))

    assert run.run(repeat, None) == [] and len(results) == 2


@pytest.mark.deep
def test_drawn_edits_are_refuted():
    """All that change a result; a quarter of these may lack the line."""
    verdicts = []
    for edit in draw_edits(0, sum(count_sites(program, kind) for program in PROGRAMS for kind in KINDS)):
        verdicts.append(judge(edit))
        if sum(verdict.changes for verdict in verdicts) == COUNT:
            break
    changed = [verdict for verdict in verdicts if verdict.changes]
    missed = [verdict for verdict in changed if verdict.outcome != "refuted"]
    assert len(changed) == COUNT and not missed, missed
    assert sum(verdict.is_named for verdict in changed) >= NAMED * COUNT
    # What changes no result is not refuted, but for what only ties or rare inputs show.
    same = [verdict for verdict in verdicts if not verdict.changes]
    assert {verdict.outcome for verdict in same} <= {"proved", "not decided", "refuted"}
