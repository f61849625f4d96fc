"""One test for both tiers: chosen rows by default, and whatever hypothesis draws in the deep profile."""

import os

import pytest
from hypothesis import given

DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"


def covered(rows, /, **strategies):
    """Runs a test on rows, dicts of its arguments; in the deep profile on drawn arguments, each compiled anew."""
    if DEEP:
        return given(**strategies)
    names = list(strategies)
    return pytest.mark.parametrize(names, [[row[name] for name in names] for row in rows])
