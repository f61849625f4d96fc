"""The reference transformer, dense and with experts, on every mesh of eight devices: the numbers of one device."""

from __future__ import annotations

import pytest
from conformance import MESH_MODELS, mesh_rows
from test_conformance import check

MODELS = {model.name: model for model in MESH_MODELS}


def cases(rest):
    """Every mesh; what is done with most of them is for them to say."""
    for name, model in MODELS.items():
        for index, row in enumerate(mesh_rows(name)):
            few = index % 4 == 0 or ("sequence" in row.name and len(row.sizes) == 3)
            marks = () if few else (rest,)
            yield pytest.param(row, model, id=f"{name}-{row.name}".replace(" ", "_").replace("=", ""), marks=marks)


# proves S75, S92, F24, F25, F27, F30, F33: unequal weights and dropout on
@pytest.mark.parametrize(("row", "model"), list(cases(pytest.mark.slow)))
def test_loss_and_gradients_equal_one_device(row, model):
    check(row, model, "sgd", 1)


# proves S92, F53
@pytest.mark.slow
@pytest.mark.parametrize(("row", "model"), list(cases(pytest.mark.sweep)))
def test_three_adamw_steps_equal_one_device(row, model):
    check(row, model, "adamw", 3)
