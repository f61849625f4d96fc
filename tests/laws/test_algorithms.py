"""The laws on every plan with every algorithm that it can use."""

import pytest

from shardkit.testing import LAWS
from support.algorithms import ACCUMULATE, GRID, WAYS, first_step, pairs, plan_row
from support.training import ONCE, check

pytestmark = pytest.mark.optimized

# Algorithms of several hops, of levels, and with rounding; the other pairs are deep.
FEW = {("dp x tp", "ring"), ("hsdp", "hierarchical"), ("fsdp pad", "bfloat16 in two levels")}


def rows():
    for pair in pairs():
        yield pytest.param(*pair, id=" by ".join(pair).replace(" ", "_"), marks=() if pair in FEW else pytest.mark.deep)


# Catches a plan that gathers or sums by another algorithm than the one it was given, or over other axes, or twice: one
# device's numbers, or numbers within the bound of the rounding, and the bytes of the algorithm's closed form.
# proves N1: except for deterministic sums, which are an argument of the step
@pytest.mark.parametrize(("plan", "way"), list(rows()))
def test_every_plan_by_every_algorithm(plan, way):
    reference = first_step(plan, way) if WAYS[way].sums else None
    laws = LAWS if (plan, way) in FEW else ONCE
    check(plan_row(plan, way), GRID, "sgd", laws=laws, reference=reference, accumulate=ACCUMULATE)
