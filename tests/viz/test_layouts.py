"""The layout of a tree: a filled cell exactly where a mesh axis splits a leaf, and bars of bytes per device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import viz

pytestmark = pytest.mark.check
MESH = sk.abstract_mesh(data=2, model=4)


def array(shape, *spec):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(MESH, P(*spec)))


TREE = {"b": array((16,)), "v": array((16, 8), None, ("data", "model")), "w": array((8, 16), "model", "data")}


def cells(picture):
    return {patch.get_gid(): patch for patch in picture.axes[0].patches if patch.get_gid()}


def test_cells_are_the_splits_of_the_specs():
    """It alone finds a leaf drawn as split along another axis, or another dim."""
    picture = viz.tree(TREE)
    found = cells(picture)
    assert set(found) == {"v, data", "v, model", "w, data", "w, model"}
    words = [text.get_text() for text in picture.axes[0].texts]
    assert words == ["data=2", "dim 1", "dim 1", "model=4", "dim 1", "dim 0"]
    assert found["w, data"].get_facecolor() != found["w, model"].get_facecolor()
    assert found["w, data"].get_x() == pytest.approx(0.04) and found["w, model"].get_x() == pytest.approx(1.04)
    assert found["w, data"].get_y() == pytest.approx(2.08)


def test_bars_are_bytes_per_device():
    picture = viz.tree(TREE)
    bars = {patch.get_gid(): patch.get_width() for patch in picture.axes[1].patches}
    assert bars == {"b": 64, "v": 64, "w": 64}
    assert [text.get_text() for text in picture.axes[1].texts] == ["64 B", "64 B of 512 B", "64 B of 512 B"]
    heads = [text.get_text() for text in picture.texts]
    assert heads[:2] == ["layout of 3 arrays on 8 devices", "192 B on each device, 1.062 KiB in all"]
    assert heads[2:] == ["b", "16 float32", "v", "16x8 float32", "w", "8x16 float32"]


def test_the_smallest_leaves_are_one_row_without_a_layout():
    tree = {f"x{i}": array((16 * i,), "data") for i in range(1, 6)}
    picture = viz.tree(tree, leaves=2)
    assert set(cells(picture)) == {"x4, data", "x5, data"}
    bars = {patch.get_gid(): patch.get_width() for patch in picture.axes[1].patches}
    assert bars == {"x4": 128, "x5": 160, "3 smaller": 192}
    assert len(picture.axes[0].patches) == 4  # none for what stands together


def test_a_tree_on_the_host_has_no_axes():
    picture = viz.tree({"w": np.ones((2, 3)), "n": np.float32(1)})
    assert cells(picture) == {} and picture.texts[0].get_text() == "layout of 2 arrays"


@pytest.mark.parametrize(("tree", "leaves"), [({}, 40), (TREE, 0)])
def test_nothing_to_draw_is_refused(tree, leaves):
    with pytest.raises(ValueError) as error:
        viz.tree(tree, leaves=leaves)
    assert str(error.value) == (
        f"viz.tree: the tree must have leaves, and at least 1 must be drawn; got {len(tree)} leaves and "
        f"leaves={leaves}. Pass for example a train state."
    )
