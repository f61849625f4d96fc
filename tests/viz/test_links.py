"""What connects the devices of a mesh: as their places, hosts and slices say."""

import numpy as np
import pytest
from jax.sharding import Mesh

import shardkit as sk
from shardkit import viz
from shardkit.viz.links import between, described

pytestmark = pytest.mark.check


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
    ("one", "other", "kind", "words"),
    [
        (Device(0, (0, 0, 0)), Device(1, (1, 0, 0)), "link", "one link of the torus"),
        (Device(0, (0, 0, 0)), Device(1, (1, 2, 0)), "hops", "3 links of the torus"),
        (Device(0, (1, 0, 0)), Device(1, (1, 0, 0)), "chip", "one chip"),
        (Device(0, (0, 0, 0)), Device(8, (0, 0, 0), 1, 1), "network", "the network between slices"),
        (Device(0), Device(1), "host", "inside one host"),
        (Device(0), Device(8, process=1), "network", "the network between hosts"),
    ],
)
def test_what_is_between_two_devices(one, other, kind, words):
    """It alone finds a diagonal of the torus called one link."""
    assert between(one, other) == between(other, one) == (kind, words)


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


def test_lines_join_neighbors_and_differ_by_what_connects_them():
    """It alone finds a line between devices that are no neighbors, or the network drawn as a link."""
    [axes] = viz.mesh(hosts(4, 2, per=4)).axes
    found = {line.get_gid(): line for line in axes.lines}
    across = {f"{i} to {i + 1}: inside one host" for i in (0, 2, 4, 6)}
    down = {f"{i} to {i + 2}: inside one host" for i in (0, 1, 4, 5)}
    far = {f"{i} to {i + 2}: the network between hosts" for i in (2, 3)}
    assert set(found) == across | down | far
    assert {name for name, line in found.items() if line.get_linestyle() != "-"} == far
    x, y = found["2 to 4: the network between hosts"].get_data()
    assert np.mean(x) == 0.5 and np.mean(y) == 2.0


def test_a_cell_has_its_place_on_the_torus():
    words = [text.get_text() for axes in viz.mesh(torus(2, 2, wide=2)).axes for text in axes.texts]
    assert words == ["0\n(0,0,0)", "1\n(1,0,0)", "2\n(0,1,0)", "3\n(1,1,0)"]


def test_simulated_devices_are_inside_one_host(mesh2x4):
    assert described(mesh2x4) == ["data, model: inside one host"]
    assert not viz.array(sk.shard(np.ones((8, 4)), mesh2x4)).axes[0].lines


def test_many_devices_have_no_lines():
    assert not viz.mesh(torus(33, 16, wide=33)).axes[0].lines
