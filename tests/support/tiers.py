"""One test for both tiers: chosen rows by default, and these and what hypothesis draws in the deep profile."""

import os

import pytest
from hypothesis import example, given, settings

DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"


def covered(rows, /, **strategies):
    """Runs a test on rows, dicts of its arguments; in the deep profile on these and on drawn arguments."""
    if DEEP:  # ten examples: each is compiled anew, and each run of the tier draws others

        def drawn(test):
            test = settings(max_examples=10)(given(**strategies)(test))
            for row in rows:  # which may have values that this test does not take
                test = example(**{name: row[name] for name in strategies})(test)
            return test

        return drawn
    names = list(strategies)
    values = [[row[name] for name in names] for row in rows]
    return pytest.mark.parametrize(names, values, ids=map(str, range(len(rows))))
