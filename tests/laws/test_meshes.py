"""The transformer on every mesh of eight: alone in finding what is wrong with four devices or more along an axis."""

import pytest

from support.conformance import MESH_MODELS, mesh_rows, one_form
from support.training import check

CASES = [
    pytest.param(row, model, id=f"{model.name}-{row.name}".replace(" ", "_").replace("=", ""))
    for model in MESH_MODELS
    for row in one_form(mesh_rows(model.name))
]


@pytest.mark.deep
@pytest.mark.parametrize(("row", "model"), CASES)
def test_every_mesh_of_eight(row, model):
    check(row, model)
