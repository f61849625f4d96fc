"""The laws over meshes with Explicit axes, and beside an axis that is left to the partitioner."""

from __future__ import annotations

import math
import zlib

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
    """All plans on Explicit axes and, where two devices are left, beside an axis of two; a few in the default tier."""
    for row in PLANS:
        for i, kind in enumerate(KINDS):
            few = (zlib.crc32(row.name.encode()) + i) % 16 == 0
            beside = kind != "Explicit"
            if not beside or math.prod(row.sizes.values()) <= 4:
                name = f"{row.name}-{kind}".replace(" ", "_")
                yield pytest.param(row, kind, id=name, marks=() if few else pytest.mark.deep)


# proves F7, S18: every plan's numbers, census, compiled program, donation and one compilation
@pytest.mark.parametrize(("row", "kind"), list(rows()))
def test_every_law_holds(row, kind):
    if kind == "Explicit":
        check(row, SOFTMAX, laws=(*ONCE, restores_elsewhere), axis_types=EXPLICIT)
    else:
        types = (AUTO,) * len(row.sizes) + (KINDS[kind],)
        wider = row._replace(sizes=row.sizes | {"other": 2})
        check(wider, SOFTMAX, axis_types=types, manual=tuple(row.sizes))
