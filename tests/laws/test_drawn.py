"""Strategies that nobody chose: options of a training step drawn by hypothesis, each under every law."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, assume, given, settings

from shardkit.testing import LAWS
from support.rows import DEEP_FACTORS, FACTORS, allowed, assert_every_law, case_of
from support.training import ONCE

PARTS = 40


@st.composite
def choices(draw, factors):
    """One value of each factor, so that they may stand together."""
    choice = {}
    for name in draw(st.permutations(list(factors))):
        values = [value for value in factors[name] if allowed({**choice, name: value})]
        assume(values)
        choice[name] = draw(st.sampled_from(values))
    return {name: choice[name] for name in factors}


@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.deep) for i in range(1, PARTS))])
def test_drawn_strategies(part):  # proves N10
    """Each part has its own order of the values, so that the same draws are other strategies."""
    order = random.Random(part)
    every = DEEP_FACTORS if part else FACTORS | {"stage": [None]}  # pipelines take longest to compile
    factors = {name: order.sample(values, len(values)) for name, values in every.items()}

    @settings(max_examples=1 if part == 0 else 5, phases=[Phase.generate])
    @given(choices(factors), st.integers(0, 5))
    def law(choice, turn):
        assert_every_law(case_of(choice, turn), LAWS if part else ONCE)

    law()
