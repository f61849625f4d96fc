"""A scatter against a whole reduction: what the cost model says, and what the traced program sends."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import cost

pytestmark = pytest.mark.check


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_scatter_sends_fewer_bytes_than_a_reduction(n):  # proves S47
    mesh, x = sk.abstract_mesh(a=n), jax.ShapeDtypeStruct((n * 8, 3), np.float32)
    size = 8 * 3 * 4

    def counted(kernel, out):
        return sk.census(jax.shard_map(kernel, mesh=mesh, in_specs=P("a"), out_specs=out), x)

    reduction, scatter = (
        counted(lambda x: sk.all_reduce(x, "a"), P()),
        counted(lambda x: sk.reduce_scatter(x, "a"), P("a")),
    )
    assert [(row.kind, row.count, row.bytes_in) for each in (reduction, scatter) for row in each.rows] == [
        ("all_reduce", 1, size),
        ("reduce_scatter", 1, size),
    ]
    models = [cost.wire(kind, size, n).sent for kind in ("all_reduce", "reduce_scatter")]
    assert [reduction.sent(), scatter.sent()] == models
    assert scatter.sent() * 2 == reduction.sent() > 0
    pair = counted(lambda x: sk.all_gather(sk.reduce_scatter(x, "a"), "a", replicated=True), P())
    assert pair.sent() == reduction.sent()  # and the gather that makes it whole is the other half
