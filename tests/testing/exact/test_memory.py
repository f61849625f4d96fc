"""What a run computed is recalled where the same step reads the same arrays, and nowhere else."""

import numpy as np

from shardkit.testing.exact.memory import StepMemory


def count_calls(memory, step, place, operands):
    """How often a step computes: 0 where it is recalled."""
    calls = []
    memory.recall(step, place, operands, lambda: calls.append(step))
    return len(calls)


def test_a_step_is_recalled_by_what_it_reads():
    memory, step, other = StepMemory(), object(), object()
    x, y = np.zeros(2), np.zeros(2)
    assert count_calls(memory, step, "", [x]) == 1
    assert count_calls(memory, step, "", [x]) == 0
    # Equal numbers, another line of the call, another step: what these give is not known.
    assert count_calls(memory, step, "", [y]) == 1
    assert count_calls(memory, step, "kernel.py:3", [x]) == 1
    assert count_calls(memory, other, "", [x]) == 1


# Hundreds of runs with changes would each leave their arrays.
def test_only_the_first_run_is_remembered():
    memory, step, x = StepMemory(), object(), np.zeros(2)
    memory.close()
    assert count_calls(memory, step, "", [x]) == 1
    assert count_calls(memory, step, "", [x]) == 1
