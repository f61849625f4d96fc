"""The laws over meshes with Explicit axes, and beside an axis that is left to the partitioner."""

from __future__ import annotations

import math

import pytest
from jax.sharding import AxisType

from shardkit.runtime import restores_elsewhere
from support.conformance import MODELS, PLANS
from support.training import ONCE, check

pytestmark = pytest.mark.optimized

SOFTMAX, _ = MODELS
EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
KINDS = {"Explicit": EXPLICIT, "beside Auto": AUTO, "beside Explicit": EXPLICIT}
FEW = {
    ("zero1", "beside Explicit"),
    ("zero1 layerwise", "Explicit"),
    ("fsdp over two axes, one of one device", "Explicit"),
    ("fsdp pad x zero2 pad x dp", "Explicit"),
}


def rows():
    """All plans on Explicit axes and, where two devices are left, beside an axis of two; a few in the default tier."""
    for row in PLANS:
        for kind in KINDS:
            few = (row.name, kind) in FEW
            beside = kind != "Explicit"
            if not beside or math.prod(row.sizes.values()) <= 4:
                name = f"{row.name}-{kind}".replace(" ", "_")
                yield pytest.param(row, kind, id=name, marks=() if few else pytest.mark.deep)


# proves F7, S18: every plan's numbers, census, compiled program, donation and one compilation
@pytest.mark.quick("zero1-beside_Explicit")
@pytest.mark.parametrize(("row", "kind"), list(rows()))
def test_every_law_holds(row, kind):
    if kind == "Explicit":
        check(row, SOFTMAX, laws=(*ONCE, restores_elsewhere), axis_types=EXPLICIT)
    else:
        types = (AUTO,) * len(row.sizes) + (KINDS[kind],)
        wider = row._replace(sizes=row.sizes | {"other": 2})
        check(wider, SOFTMAX, axis_types=types, manual=tuple(row.sizes))
