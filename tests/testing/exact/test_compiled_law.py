"""The compiled step of rows of the covering list is the traced one, for all parameters and floats of a batch."""

import pytest

from shardkit.testing.exact.compiled_law import compiled
from support import rows

pytestmark = pytest.mark.optimized

CHOICES = [case.choice for case in rows.cases()]
# Seen to be proved with jax 0.10 and 0.12. Of the others, rows with adafactor, and with muon on jax 0.10, are "not
# decided": XLA computes with several constants in float32. None may be refuted.
PROVED = (0, 1, 5, 8, 10, 11, 15)
UNDECIDED = (2, 3, 4, 9, 21)  # the rows that are not here were not run yet, or take two minutes


# proves N49: also behind the compiler
@pytest.mark.quick("1")
@pytest.mark.parametrize("number", sorted(PROVED + UNDECIDED))
def test_rows_of_the_covering_list(number, monkeypatch):
    """Alone in running the reader of modules on steps with every option."""
    choice = CHOICES[number]
    four = choice["stage"] and rows.ways_of(choice) == 4  # of whose examples a device's must make microbatches
    rows.shrink(monkeypatch, 48 if four else 24)
    note = compiled(rows.program_of(rows.case_of(choice, number)), None)  # a row that is refuted raises
    if number in PROVED:
        assert note is None
