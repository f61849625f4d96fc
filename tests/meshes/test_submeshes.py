"""The slices of a mesh, and arrays that are joined over it."""

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.meshes.submeshes import join_submeshes


def test_a_mesh_is_cut_along_an_axis():  # proves F5
    mesh = sk.make_mesh(data=2, stage=4)
    parts = sk.submeshes(mesh, "stage")
    assert [dict(part.shape) for part in parts] == [{"data": 2, "stage": 1}] * 4
    for s, part in enumerate(parts):
        assert list(part.devices.flat) == list(mesh.devices[:, s])
        assert part.axis_types == mesh.axis_types


def test_arrays_of_submeshes_are_one_array_in_the_same_buffers():
    mesh = sk.make_mesh(stage=2, data=4)
    parts = sk.submeshes(mesh, "stage")
    arrays = [{"w": sk.shard(jnp.full((3, 8), float(s)), part, P(None, "data"))} for s, part in enumerate(parts)]
    joined = join_submeshes(arrays, mesh, {"w": P("stage", "data")}, rows=True)["w"]
    np.testing.assert_array_equal(joined, np.repeat([[0.0], [1.0]], 3, axis=0) * np.ones(8))
    pointers = [shard.data.unsafe_buffer_pointer() for each in arrays for shard in each["w"].addressable_shards]
    assert sorted(shard.data.unsafe_buffer_pointer() for shard in joined.addressable_shards) == sorted(pointers)
