"""Padding and the collectives for uneven sizes, against lists of blocks: forward and gradient."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import collectives
from shardkit.collectives import all_gather_uneven, reduce_scatter_uneven
from shardkit.testing import reference
from support.blocks import Kernel, check, on_cases


def sizes_of(case):
    """A size for every device, of which one is the largest."""
    return tuple(np.roll([2, 0, 1, 2, 1, 0, 2, 2][: case.count], case.seed).tolist())


def shaped(case, dim, rows):
    return (rows, case.shape[1]) if dim == 0 else (case.shape[0], rows)


@on_cases
def test_all_gather_uneven(case):  # proves F13
    sizes = sizes_of(case)

    def kernel(dim, replicated):
        run = partial(all_gather_uneven, sizes=sizes, axis=case.axis, dim=dim, replicated=replicated)
        return Kernel(run, partial(reference.all_gather_uneven, sizes=sizes, dim=dim), shaped(case, dim, max(sizes)))

    check(case, *[kernel(dim, replicated) for dim in (0, -1) for replicated in (False, True)])


@on_cases
def test_reduce_scatter_uneven(case):  # proves F13
    sizes = sizes_of(case)

    def kernel(dim):
        run = partial(reduce_scatter_uneven, sizes=list(sizes), axis=case.axis, dim=dim)
        means = partial(reference.reduce_scatter_uneven, sizes=sizes, dim=dim)
        return Kernel(run, means, shaped(case, dim, sum(sizes)))

    check(case, kernel(0), kernel(-1))


@pytest.mark.parametrize(("n", "size", "padded"), [(1, 5, 5), (2, 5, 6), (3, 5, 6), (5, 5, 5), (8, 5, 8), (8, 0, 0)])
def test_pad_and_unpad(n, size, padded):  # proves F13
    """The rule: zeros at the end of the dim, up to the next multiple; a sum of uneven rows, scattered and joined."""
    mesh = sk.make_mesh(jax.devices()[:n], a=n)
    x = {"rows": np.arange(size * 2, dtype=np.float32).reshape(size, 2) + 1, "columns": np.ones((3, size), bool)}
    seen = {}

    def kernel(x):
        rows = collectives.pad_to_axis(x["rows"], "a")
        columns = collectives.pad_to_axis(x["columns"], "a", dim=-1)
        seen.update(rows=rows.shape, columns=columns.shape)
        mine = sk.reduce_scatter(rows, "a")
        whole = sk.all_gather(mine, "a", replicated=True)
        unpad = collectives.unpad_from_axis
        return {"rows": unpad(whole, size), "columns": unpad(columns, size, dim=1), "padded": rows}

    got = jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=P(), out_specs=P()))(x)
    assert seen == {"rows": (padded, 2), "columns": (3, padded)}
    np.testing.assert_array_equal(got["rows"], n * x["rows"])
    np.testing.assert_array_equal(got["columns"], x["columns"])
    np.testing.assert_array_equal(got["padded"], np.pad(x["rows"], ((0, padded - size), (0, 0))))


def test_what_is_padded_may_hold_anything():
    mesh = sk.make_mesh(jax.devices()[:3], a=3)
    x = np.array([[1, 2], [np.nan, np.inf], [3, np.nan]], np.float32)
    gather = partial(all_gather_uneven, sizes=(2, 0, 1), axis="a", replicated=True)
    device = jax.shard_map(lambda x: gather(x[0]), mesh=mesh, in_specs=P("a"), out_specs=P())
    assert np.asarray(jax.jit(device)(x)).tolist() == [1, 2, 3]
    gradient = jax.jit(jax.grad(lambda x: device(x).sum()))(x)
    assert np.asarray(gradient).tolist() == [[1, 1], [0, 0], [1, 0]]
