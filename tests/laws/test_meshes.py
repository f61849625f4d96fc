"""The reference transformer, dense and with experts, on every mesh of eight devices: the numbers of one device."""

from __future__ import annotations

import pytest

from support.conformance import MESH_MODELS, mesh_rows
from support.training import check

MODELS = {model.name: model for model in MESH_MODELS}


def cases(rest, every=4):
    """Every mesh: one in so many as it is, and those that have the most at once; all others are marked `rest`."""
    for name, model in MODELS.items():
        for index, row in enumerate(mesh_rows(name)):
            few = index % every == 0 or (every == 4 and "sequence" in row.name and len(row.sizes) == 3)
            marks = () if few else (rest,)
            yield pytest.param(row, model, id=f"{name}-{row.name}".replace(" ", "_").replace("=", ""), marks=marks)


# proves S75, S92, F24, F25, F27, F30, F33: unequal weights and dropout on
@pytest.mark.parametrize(("row", "model"), list(cases(pytest.mark.deep)))
def test_loss_and_gradients_equal_one_device(row, model):
    check(row, model, "sgd", 1)


# proves S92, F53
@pytest.mark.parametrize(("row", "model"), list(cases(pytest.mark.deep, every=8)))
def test_three_adamw_steps_equal_one_device(row, model):
    check(row, model, "adamw", 3)
