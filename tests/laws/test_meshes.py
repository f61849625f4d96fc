"""The reference transformer, dense and with experts, on every mesh of eight devices: the product, for the deep tier."""

from __future__ import annotations

import pytest

from support.conformance import MESH_MODELS, mesh_rows
from support.training import check

CASES = [
    pytest.param(row, model, id=f"{model.name}-{row.name}".replace(" ", "_").replace("=", ""))
    for model in MESH_MODELS
    for row in mesh_rows(model.name)
]


@pytest.mark.deep
@pytest.mark.parametrize(("row", "model"), CASES)
def test_every_mesh_of_eight(row, model):
    check(row, model)
