"""Every law on the rows of the covering list, on every mesh, and on every plan with every algorithm that it can use."""

import pytest

from shardkit.runtime import restores_elsewhere
from shardkit.testing import LAWS
from support.algorithms import ACCUMULATE, GRID, WAYS, first_step, pairs, plan_row
from support.conformance import MESH_MODELS, mesh_rows, one_form
from support.rows import assert_every_law, cases, program_of
from support.training import ONCE, check

pytestmark = pytest.mark.optimized

CASES = cases()
# The deep tier has every pair of options, a row 36 seconds of CPU time; testing/exact/test_steps.py proves rows with
# every option for all inputs in the default tier.
FEW = [21, 31]
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


# Proofs build steps without the checks of a first call; what alone finds one that refuses a right program.
@pytest.mark.parametrize("case", ROWS)
def test_the_first_call_refuses_no_row(case):
    program = program_of(case)
    init, step = program.checked()
    state, batch = init(program.params, program.key), program.calls[0]
    step._first(step.trace(state, batch), step._arguments(state, batch))


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


# Algorithms of several hops, of levels, and with rounding; the other pairs are deep.
FEW_PAIRS = {("dp x tp", "ring"), ("hsdp", "hierarchical"), ("fsdp pad", "bfloat16 in two levels")}


def rows():
    for pair in pairs():
        yield pytest.param(
            *pair, id=" by ".join(pair).replace(" ", "_"), marks=() if pair in FEW_PAIRS else pytest.mark.deep
        )


# Catches a plan that gathers or sums by another algorithm than the one it was given, or over other axes, or twice: one
# device's numbers, or numbers within the bound of the rounding, and the bytes of the algorithm's closed form.
# proves N1: except for deterministic sums, which are an argument of the step
@pytest.mark.parametrize(("plan", "way"), list(rows()))
def test_every_plan_by_every_algorithm(plan, way):
    reference = first_step(plan, way) if WAYS[way].sums else None
    laws = LAWS if (plan, way) in FEW_PAIRS else ONCE
    check(plan_row(plan, way), GRID, "sgd", laws=laws, reference=reference, accumulate=ACCUMULATE)
