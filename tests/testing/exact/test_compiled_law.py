"""The compiled step of every row of the covering list is the traced one, for all parameters and floats of a batch."""

import pytest

from shardkit.testing.exact.compiled_law import compiled
from support import rows

pytestmark = pytest.mark.optimized

CHOICES = [case.choice for case in rows.cases()]


# proves N49: also behind the compiler
@pytest.mark.quick("1")
@pytest.mark.parametrize("number", range(len(CHOICES)))
def test_every_row_of_the_covering_list(number, monkeypatch):
    """Alone in running the reader of modules on steps with every option."""
    choice = CHOICES[number]
    four = choice["stage"] and rows.ways_of(choice) == 4  # of whose examples a device's must make microbatches
    rows.shrink(monkeypatch, 48 if four else 24)
    assert compiled(rows.program_of(rows.case_of(choice, number)), None) is None
