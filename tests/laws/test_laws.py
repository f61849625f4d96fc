"""Every law on the rows of the covering list, and on every mesh: one program a row, traced, compiled and run once."""

import pytest

from shardkit.runtime import restores_elsewhere
from shardkit.testing import LAWS
from support.conformance import MESH_MODELS, mesh_rows, one_form
from support.rows import assert_every_law, cases
from support.training import ONCE, check

pytestmark = pytest.mark.optimized

CASES = cases()
# The deep tier has every pair of options, a row 36 seconds of CPU time; testing/exact/test_steps.py proves rows with
# every option for all inputs in the default tier.
FEW = [20]
ROWS = [
    pytest.param(case, marks=() if i in FEW else pytest.mark.deep, id=case.name.replace(", ", "-").replace(" ", "_"))
    for i, case in enumerate(CASES)
]


# proves S58, S59, S60, S63, S75, S80, S86, S87, S88, S92, S94, F14, F15, F17, F18, F19, F22, F24, F25, F27, F30, F31,
# F32, F33, F36, F37, F38, F45, F47, F51, F53, F54, F56, F57, F58, F59, F60, F75, F76: unequal weights and dropout on
@pytest.mark.parametrize("case", ROWS)
def test_every_law_holds(case):
    turn = CASES.index(case) // 3 % 4
    laws = LAWS if turn == 0 else ONCE
    assert_every_law(case, (*laws, restores_elsewhere) if turn == 2 else laws)


MESHES = [
    pytest.param(row, model, id=f"{model.name}-{row.name}".replace(" ", "_").replace("=", ""))
    for model in MESH_MODELS
    for row in one_form(mesh_rows(model.name))
]


# Alone in finding what is wrong with four devices or more along an axis.
@pytest.mark.deep
@pytest.mark.parametrize(("row", "model"), MESHES)
def test_every_mesh_of_eight(row, model):
    check(row, model)
