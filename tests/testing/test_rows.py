"""covering: every pair of values that may meet does, in few rows, the same every time."""

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

import shardkit as sk
from shardkit.testing import Row, covering
from support.refusals import value_error
from support.rows import FACTORS, allowed, cases, sizes_of

pytestmark = pytest.mark.check


def met(rows):
    """Every two values of different factors that stand in one row."""
    return {pair for row in rows for pair in itertools.combinations(sorted(row.items()), 2)}


def possible(factors, fits):
    """By looking at every row there is."""
    names = list(factors)
    every = (dict(zip(names, values, strict=True)) for values in itertools.product(*factors.values()))
    return met(row for row in every if fits(row))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3))))
def test_every_pair_that_can_stand_in_a_row_does(sizes, refused):  # proves N8
    factors = {f"f{i}": list(range(size)) for i, size in enumerate(sizes)}

    def fits(row):  # a constraint between neighbors that looks only at what is chosen
        return all((row.get(f"f{i}", -1), row.get(f"f{i + 1}", -1)) not in refused for i in range(len(sizes) - 1))

    rows = covering(factors, fits)
    assert all(fits(row) and list(row) == list(factors) for row in rows)
    assert met(rows) == possible(factors, fits)
    assert rows == covering(factors, fits)


def test_few_rows_do_and_a_row_names_itself():
    factors = {f"f{i}": [0, 1] for i in range(12)}
    assert len(covering(factors)) <= 12  # of 4,096
    with value_error(
        "covering: factor 'plan' must have one or more values; got none. Add a value, or drop the factor."
    ):
        covering({"plan": []})
    row = Row({"data": 2, "fsdp": 4}, sk.chain(sk.dp("data"), sk.fsdp("fsdp")), accumulate=2, precision="bf16")
    assert str(row) == "data=2, fsdp=4: fsdp('fsdp') + dp('data'), accumulate=2, precision=bf16"
    assert str(row._replace(label="mine")) == "mine"


def test_the_suites_own_rows_hold_every_pair_of_options():
    """Of the options of a training step, every two that eight devices can hold together."""
    rows = [case.choice for case in cases()]
    assert all(allowed(row) for row in rows)
    for a, b in itertools.combinations(FACTORS, 2):
        for x, y in itertools.product(FACTORS[a], FACTORS[b]):
            held = any(row[a] == x and row[b] == y for row in rows)
            assert held or not covering(FACTORS | {a: [x], b: [y]}, allowed), f"{a}={x} with {b}={y}"
    assert len({case.name for case in cases()}) == len(rows)
    assert {max(sizes_of(row).values(), default=1) for row in rows} == {1, 2, 3}
