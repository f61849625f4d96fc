"""The laws over meshes with Explicit axes, and beside an axis that is left to the partitioner."""

import itertools
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


def rows():
    """All plans on Explicit axes or, where two devices are left, beside an axis of two: the kinds take turns."""
    kinds = itertools.cycle(KINDS)
    for row in PLANS:
        kind = next(kinds) if math.prod(row.sizes.values()) <= 4 else "Explicit"
        yield pytest.param(row, kind, id=f"{row.name}-{kind}".replace(" ", "_"))


# Alone in finding: a plan that is right on Auto axes alone, or that another axis of the mesh changes.
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
