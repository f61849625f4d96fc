"""The laws on every plan with every algorithm that it can use."""

from __future__ import annotations

import pytest

from shardkit.testing import LAWS
from support.algorithms import ACCUMULATE, GRID, WAYS, first_step, pairs, plan_row
from support.training import ONCE, check

pytestmark = pytest.mark.optimized

# Each algorithm, under the plans that use it in most ways; the other pairs are deep.
FEW = {
    ("dp", "bucket"),
    ("hsdp of dp", "one's own"),
    ("dp x tp", "ring"),
    ("hsdp", "hierarchical"),
    ("zero2", "int8"),
    ("fsdp layerwise", "ring in both directions"),
    ("fsdp layerwise", "int4 in two levels"),
    ("fsdp pad", "bfloat16 in two levels"),
}


def rows():
    for pair in pairs():
        yield pytest.param(*pair, id=" by ".join(pair).replace(" ", "_"), marks=() if pair in FEW else pytest.mark.deep)


# Catches a plan that gathers or sums by another algorithm than the one it was given, or over other axes, or twice: one
# device's numbers, or numbers within the bound of the rounding, and the bytes of the algorithm's closed form.
# proves N1: except for deterministic sums, which are an argument of the step
@pytest.mark.quick(
    "hsdp_by_hierarchical",
    "hsdp_of_dp_by_one's_own",
    "fsdp_pad_by_bfloat16_in_two_levels",
    "dp_x_tp_by_ring",
)
@pytest.mark.parametrize(("plan", "way"), list(rows()))
def test_every_plan_by_every_algorithm(plan, way):
    reference = first_step(plan, way) if WAYS[way].sums else None
    laws = LAWS if (plan, way) in FEW else ONCE
    check(plan_row(plan, way), GRID, "sgd", laws=laws, reference=reference, accumulate=ACCUMULATE)
