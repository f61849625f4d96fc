"""What describe says of arrays: who holds which piece, alone and beside another layout."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.meshes.inspection import draw_array
from shardkit.meshes.mesh import format_ids
from support.refusals import raises, refusals

pytestmark = pytest.mark.check

X = np.zeros((8, 4), np.float32)


# proves S37: replicas stand in one cell; of two axes, of an axis alone, of dims beyond two
@pytest.mark.parametrize(
    "picture, array",
    {
        """\
8x4 float32, P('data')
4x4, 64 bytes, on each of 8 cpu devices
       [:, 0:4]
[0:4]   0,1,2,3
[4:8]   4,5,6,7""": ((8, 4), P("data")),
        """\
8x4 float32, P('data', 'model')
4x1, 16 bytes, on each of 8 cpu devices
       [:, 0:1]  [:, 1:2]  [:, 2:3]  [:, 3:4]
[0:4]         0         1         2         3
[4:8]         4         5         6         7""": ((8, 4), P("data", "model")),
        """\
8 float32, P('model')
2, 8 bytes, on each of 8 cpu devices
  [0:2]  [2:4]  [4:6]  [6:8]
    0,4    1,5    2,6    3,7""": ((8,), P("model")),
        "scalar float32, P()\nscalar, 4 bytes, on each of 8 cpu devices\n  0,1,2,3,4,5,6,7": ((), P()),
        """\
2x3x4x5 float32, P('data', None, 'model')
1x3x1x5, 60 bytes, on each of 8 cpu devices; dims 1, 3 whole
       [:, :, 0:1]  [:, :, 1:2]  [:, :, 2:3]  [:, :, 3:4]
[0:1]            0            1            2            3
[1:2]            4            5            6            7""": ((2, 3, 4, 5), P("data", None, "model")),
    }.items(),
)
def test_the_picture_of_an_array(picture, array, mesh2x4):
    shape, spec = array
    assert sk.describe(sk.shard(np.zeros(shape, np.float32), mesh2x4, spec)) == picture


def test_three_dims_that_are_split():
    mesh = sk.make_mesh(a=2, b=2, c=2)
    x = sk.shard(np.zeros((2, 4, 3, 6), np.int8), mesh, P("c", ("b",), None, "a"))
    assert (
        sk.describe(x)
        == """\
2x4x3x6 int8, P('c', 'b', None, 'a')
1x2x3x3, 18 bytes, on each of 8 cpu devices; dim 2 whole
[0:1]
          [:, :, :, 0:3]  [:, :, :, 3:6]
[:, 0:2]               0               4
[:, 2:4]               2               6
[1:2]
          [:, :, :, 0:3]  [:, :, :, 3:6]
[:, 0:2]               1               5
[:, 2:4]               3               7"""
    )


# The devices as jax has them, for layouts whose ids are not in order.
@pytest.mark.parametrize("spec", [P(), P(None, "model"), P(("model", "data")), P("model", "data"), P("data")], ids=str)
def test_each_device_stands_where_jax_put_its_piece(spec):
    mesh = sk.make_mesh(jax.devices()[::-1], data=2, model=4)
    x = sk.shard(np.arange(64.0).reshape(8, 8), mesh, spec)
    grid = draw_array(x)
    found = {
        (device, *(label[at].split()[-1].strip("[]") for label, at in zip(grid.labels, place, strict=True)))
        for place, ids in grid.cells.items()
        for device in ids
    }
    spans = [(s.device.id, *(index.indices(8)[:2] for index in s.index)) for s in x.addressable_shards]
    assert found == {(device, *(f"{start}:{stop}" for start, stop in each)) for device, *each in spans}


# proves S31: before and after a resharding, of an array and of a tree
def test_before_and_after_side_by_side(mesh2x4):
    x, y = sk.shard(X, mesh2x4, P("data")), sk.shard(X, mesh2x4, P(None, "data"))
    array = """\
before: 8x4 float32, P('data')             after: 8x4 float32, P(None, 'data')
4x4, 64 bytes, on each of 8 cpu devices    8x2, 64 bytes, on each of 8 cpu devices
       [:, 0:4]                                   [:, 0:2]  [:, 2:4]
[0:4]   0,1,2,3                            [0:8]   0,1,2,3   4,5,6,7
[4:8]   4,5,6,7"""
    assert sk.describe(x, after=y) == array
    one = jax.device_put(X, jax.devices()[3])
    assert (
        sk.describe(X, after=one)
        == """\
before: 8x4 float32, host    after: 8x4 float32, one device
                             8x4, 128 bytes, on one cpu device
                                    [:, 0:4]
                             [0:8]         3"""
    )
    assert (
        sk.describe({"w": X, "b": x}, after={"w": x, "b": y})
        == """\
leaf  global  dtype    before     local  bytes/device  after            local  bytes/device
b     8x4     float32  P('data')  4x4    64            P(None, 'data')  8x2    64
w     8x4     float32  host       8x4    128           P('data')        4x4    64
2 leaves, before 192 bytes on each device, after 128 bytes on each device"""
    )


# proves F87: the axes over which a value varies, which is what is known there
def test_inside_shard_map(mesh2x4):
    said = []

    def kernel(x, w):
        said.append(
            sk.describe(
                {"both": x * sk.axis_index("model").astype(np.float32), "w": w, "x": x, "zeros": np.zeros(3, np.int8)}
            )
        )
        return x

    jax.eval_shape(jax.shard_map(kernel, mesh=mesh2x4, in_specs=(P("data"), P()), out_specs=P("data")), X[0], X[0])
    jax.eval_shape(lambda x: said.append(sk.describe({"x": x})), X)
    assert said == [
        """\
leaf   global  dtype    spec                         local  devices  bytes/device
both   -       float32  varies over 'data', 'model'  2      8        8
w      -       float32  the same on all              4      8        16
x      -       float32  varies over 'data'           2      8        8
zeros  3       int8     host                         3      0        3
4 leaves, 35 bytes on each device""",
        """\
leaf  global  dtype    spec    local  devices  bytes/device
x     8x4     float32  traced  8x4    0        128
1 leaf, 128 bytes on each device""",
    ]


def test_arrays_without_devices_have_a_line():
    layout = jax.NamedSharding(sk.abstract_mesh(data=64), P("data"))
    text = sk.describe(jax.ShapeDtypeStruct((128, 2), np.float32, sharding=layout))
    assert " ".join(text.splitlines()[1].split()) == "(the whole tree) 128x2 float32 P('data') 2x2 64 16"


def test_many_devices_are_ranges():
    assert format_ids((0, 4)) == "0,4" and format_ids((0, 1, 2, 3, 4, 5, 6, 8)) == "0,1,2,3,4,5,6,8"
    assert format_ids((*range(16), *range(32, 48), 50)) == "0-15,32-47,50"


NOT_ALIKE = {
    "after must have the leaves of thing; got 'v' in one of them alone. Pass the same tree, before and "
    "after.": lambda: sk.describe({"w": X}, after={"v": X})
}
NO_ARRAYS = {
    "after must come with an array or a pytree alone; got params or a mesh too. Leave them out.": lambda: sk.describe(
        X, {"w": X}, after=X
    ),
    "after must be an array or a pytree of arrays; got 'x'. Pass arrays of jax or NumPy.": lambda: sk.describe(
        X, after="x"
    ),
}


@pytest.mark.parametrize("kind, message, call", refusals(NOT_ALIKE, NO_ARRAYS))
def test_errors(kind, message, call):
    with raises(kind, f"describe: {message}"):
        call()
