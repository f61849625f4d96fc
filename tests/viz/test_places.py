"""Pictures of meshes and arrays: every device's part is where jax has its piece."""

from collections import Counter
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import viz
from shardkit.viz import style
from shardkit.viz.places import between, described

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


@pytest.mark.parametrize("sizes", [{"x": 8}, {"data": 2, "model": 4}, {"a": 2, "b": 2, "c": 2}], ids=str)
def test_a_mesh_has_a_cell_for_each_device(sizes):
    mesh = sk.make_mesh(jax.devices()[::-1], **sizes)
    picture = viz.mesh(mesh)
    assert sum(len(axes.texts) for axes in picture.axes) == 8
    found = {patch.get_gid() for axes in picture.axes for patch in axes.patches} - {None}
    coordinates = [dict(zip(sizes, at, strict=True)) for at in np.ndindex(*sizes.values())]
    names = [[f"{name}={i}" for name, i in each.items()] for each in coordinates]
    before = [" ".join(filter(None, [", ".join(n[:-2]), *n[-2:]])) for n in names]
    assert found == {f"{at} {device.id}" for at, device in zip(before, mesh.devices.flat, strict=True)}


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_same_array_gives_the_same_file(suffix, mesh2x4, tmp_path):
    files = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for file in files:
        viz.array(sk.shard(X, mesh2x4, P("model")), file)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_many_devices_stay_on_one_page():
    from shardkit.meshes.mesh import DeviceGrid
    from shardkit.viz.places import _drawn

    labels = [[str(i) for i in range(64)], ["0", "1"]]
    grid = DeviceGrid(("many",), labels, {at: (2 * at[0] + at[1],) for at in np.ndindex(64, 2)})
    picture = _drawn("viz.mesh", [grid], None)
    assert max(picture.get_size_inches()) <= 16


def test_the_ramp_is_darker_before_lighter():
    light = [np.dot(style.ramp(i, 8), (0.2126, 0.7152, 0.0722)) for i in range(8)]
    assert np.all(np.diff(light) > 0.05)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda x, mesh: viz.array(X),
            TypeError,
            "viz.array: x must be an array on devices; got a ndarray. Place it, as in sk.shard(x, mesh, spec).",
        ),
        (
            lambda x, mesh: viz.array(x, after=X[0]),
            TypeError,
            "viz.array: after must be an array on devices; got array([0., 1., 2., 3.]). Place it, as in "
            "sk.shard(x, mesh, spec).",
        ),
        (
            lambda x, mesh: viz.mesh(sk.abstract_mesh(data=8)),
            TypeError,
            "viz.mesh: mesh must have devices; got an AbstractMesh. Pass for example sk.make_mesh(data=8).",
        ),
        (
            lambda x, mesh: viz.mesh(mesh, "a.pdf"),
            ValueError,
            "viz.mesh: the picture must be a .png or .svg file; got 'a.pdf'. Pass for example 'picture.svg'.",
        ),
    ],
)
def test_errors(call, kind, message, mesh2x4):
    with pytest.raises(kind) as error:
        call(sk.shard(X, mesh2x4, P("data")), mesh2x4)
    assert str(error.value) == message


# ---- what connects the devices, as their places, hosts and slices say


class Device:
    """A device of a machine that is not here."""

    def __init__(self, number, coords=None, process=0, part=0):
        self.id, self.coords, self.process_index, self.slice_index = number, coords, process, part
        self.platform, self.device_kind = ("tpu", "TPU v5 lite") if coords else ("gpu", "NVIDIA H100")


def torus(*shape, names=("data", "model"), wide=4):
    devices = [Device(i, (i % wide, i // wide, 0)) for i in range(int(np.prod(shape)))]
    return Mesh(np.array(devices).reshape(shape), names)


def hosts(*shape, per=8, **options):
    devices = [Device(i, process=i // per, **options) for i in range(int(np.prod(shape)))]
    return Mesh(np.array(devices).reshape(shape), ("data", "model"))


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (Device(0, (0, 0, 0)), Device(1, (1, 0, 0)), "one link of the torus"),
        (Device(0, (0, 0, 0)), Device(1, (1, 2, 0)), "3 links of the torus"),
        (Device(0, (1, 0, 0)), Device(1, (1, 0, 0)), "one chip"),
        (Device(0, (0, 0, 0)), Device(8, (0, 0, 0), 1, 1), "the network between slices"),
        (Device(0), Device(1), "inside one host"),
        (Device(0), Device(8, process=1), "the network between hosts"),
    ],
)
def test_what_is_between_two_devices(one, other, words):
    """It alone finds a diagonal of the torus called one link."""
    assert between(one, other) == between(other, one) == words


@pytest.mark.parametrize(
    ("mesh", "lines"),
    [
        (torus(4, 4), ["data, model: one link of the torus; last to first: 3 links of the torus"]),
        (torus(2, 8), ["data: 2 links of the torus",
                       "model: one link of the torus or 4 links of the torus; last to first: 4 links of the torus"]),
        (hosts(2, 8), ["data: the network between hosts", "model: inside one host"]),
        (torus(4, 1), ["data: one link of the torus; last to first: 3 links of the torus"]),
    ],
)  # fmt: skip
def test_a_line_per_axis_says_what_its_collectives_run_over(mesh, lines):
    assert described(mesh) == lines
    assert [text.get_text() for text in viz.mesh(mesh).texts][1 : 1 + len(lines)] == lines


def test_a_cell_has_its_place_on_the_torus():
    words = [text.get_text() for axes in viz.mesh(torus(2, 2, wide=2)).axes for text in axes.texts]
    assert words == ["0\n(0,0,0)", "1\n(1,0,0)", "2\n(0,1,0)", "3\n(1,1,0)"]


def test_simulated_devices_are_inside_one_host(mesh2x4):
    assert described(mesh2x4) == ["data, model: inside one host"]
