"""Pictures of arrays: every device's part is where jax has its piece."""

from collections import Counter
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import viz
from shardkit.meshes.mesh import DeviceGrid
from shardkit.viz import style
from shardkit.viz.places import draw_grids
from support.refusals import refused

pytestmark = pytest.mark.check

X = np.arange(32.0).reshape(8, 4)


def parts(file):
    """The labels of the parts in an .svg, and all of its words."""
    root = ElementTree.parse(file).getroot()
    words = Counter(element.text for element in root.iter() if element.tag.endswith("}text"))
    return {element.get("id") for element in root.iter() if (element.get("id") or "").startswith("[")}, words


# proves S37: replicas share a cell, before and after
def test_an_svg_holds_each_devices_piece(mesh2x4, tmp_path):
    before, after = sk.shard(X, mesh2x4, P("data", "model")), sk.shard(X, mesh2x4, P(None, "model"))
    viz.array(before, tmp_path / "made" / "x.svg", after=after)
    labels, words = parts(tmp_path / "made" / "x.svg")
    expected = set()
    for x in (before, after):
        for piece in x.addressable_shards:
            (top, bottom, _), (left, right, _) = (i.indices(n) for i, n in zip(piece.index, X.shape, strict=True))
            expected.add(f"[{top}:{bottom}] [:, {left}:{right}] {piece.device.id}")
    assert len(expected) == 16 and labels == expected
    assert {"before: 8x4 float32, P('data', 'model')", "after: 8x4 float32, P(None, 'model')"} <= set(words)
    assert all(words[str(device.id)] == 2 for device in jax.devices())


def test_a_png_has_a_devices_color_in_its_part(mesh2x4, tmp_path):
    from matplotlib.image import imread

    picture = viz.array(sk.shard(X, mesh2x4, P("data")), tmp_path / "x.png")
    pixels = imread(tmp_path / "x.png")[:, :, :3]
    place = picture.axes[0].transData.transform
    for device in range(8):
        x, y = place(((device % 4 + 0.2) / 4, device // 4 + 0.5))
        assert pixels[pixels.shape[0] - 1 - int(y), int(x)] == pytest.approx(style.ramp(device, 8), abs=0.01)


def test_many_devices_stay_on_one_page_and_the_ramp_is_darker_before_lighter():
    labels = [[str(i) for i in range(64)], ["0", "1"]]
    grid = DeviceGrid(("many",), labels, {at: (2 * at[0] + at[1],) for at in np.ndindex(64, 2)})
    assert max(draw_grids([grid]).get_size_inches()) <= 16
    light = [np.dot(style.ramp(i, 8), (0.2126, 0.7152, 0.0722)) for i in range(8)]
    assert np.all(np.diff(light) > 0.05)


def test_what_is_on_no_devices_is_refused(mesh2x4):
    assert refused(lambda: viz.array(X), TypeError) == (
        "viz.array: x must be an array on devices; got a ndarray. Place it, as in sk.shard(x, mesh, spec)."
    )
    assert refused(lambda: viz.array(sk.shard(X, mesh2x4, P("data")), after=X[0]), TypeError) == (
        "viz.array: after must be an array on devices; got array([0., 1., 2., 3.]). Place it, as in sk.shard(x, mesh, "
        "spec)."
    )
