"""The references of the kernels where nothing else looks: one device alone, negative dims, ties, and other axes."""

import numpy as np
import pytest

from shardkit.testing import reference

pytestmark = pytest.mark.check

BLOCK = np.arange(6).reshape(2, 3)


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        ("all_reduce", {}, BLOCK),
        ("all_reduce", {"op": "mean"}, BLOCK.astype(float)),
        ("all_reduce", {"op": "min"}, BLOCK),
        ("all_gather", {"dim": 1}, BLOCK),
        ("reduce_scatter", {"dim": 1}, BLOCK),
        ("all_to_all", {"split_dim": 0, "concat_dim": 1}, BLOCK),
        ("shift", {}, BLOCK),
        ("shift", {"wrap": False}, 0 * BLOCK),
        ("broadcast", {}, BLOCK),
        ("vary", {}, BLOCK),
        ("prefix_scan", {}, BLOCK),
        ("prefix_scan", {"exclusive": True}, 0 * BLOCK),
        ("halo_exchange", {"dim": 1, "wrap": True}, BLOCK[:, [2, 0, 1, 2, 0]]),
        ("halo_exchange", {"before": 0}, np.concatenate([BLOCK, [[0, 0, 0]]])),
        ("gather_to_one", {"dim": 1}, BLOCK),
        ("all_gather_uneven", {"sizes": (1,)}, BLOCK[:1]),
        ("reduce_scatter_uneven", {"sizes": (2,), "dim": -1, "op": "sum"}, BLOCK[:, :2]),
    ],
)
def test_of_one_device(name, options, wanted):
    """An axis of size 1 has no second block to look at."""
    [found] = getattr(reference, name)([BLOCK], **options)
    np.testing.assert_array_equal(found, wanted)
    assert found.dtype.kind == wanted.dtype.kind


def test_a_halo_is_of_the_neighbours_on_each_side():
    blocks = [np.array([[1, 2]]), np.array([[3, 4]]), np.array([[5, 6]])]
    for options, wanted in (
        ({}, [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 0]]),
        ({"wrap": True}, [[6, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 1]]),
        ({"before": 2, "after": 0}, [[0, 0, 1, 2], [1, 2, 3, 4], [3, 4, 5, 6]]),
        ({"before": 0, "after": 3}, [[1, 2, 3, 4, 5], [3, 4, 5, 6, 0], [5, 6, 0, 0, 0]]),
    ):
        found = reference.halo_exchange(blocks, dim=1, **options)
        assert [block.tolist()[0] for block in found] == wanted


def test_the_neutral_elements_of_an_exclusive_scan():
    for dtype, op, first in (
        (np.int32, "sum", 0),
        (np.int32, "max", -(2**31)),
        (np.int32, "min", 2**31 - 1),
        (np.float32, "max", -np.inf),
        (np.float32, "min", np.inf),
        (bool, "max", False),
        (bool, "min", True),
    ):
        found = reference.prefix_scan([np.ones(1, dtype)] * 2, op=op, exclusive=True)
        assert found[0].tolist() == [first] and found[1].tolist() == [1]


def test_the_axes_of_a_collective_are_counted_in_the_order_that_is_passed():
    """The first is major, wherever it stands in the mesh; the others are apart."""
    blocks = np.arange(12).reshape(2, 3, 2, 1)  # of a mesh a=2, b=3, c=2
    sizes = {"a": 2, "b": 3, "c": 2}
    gathered = reference.over_mesh(reference.all_gather, blocks, sizes, ("c", "a"))
    assert gathered.shape == (2, 3, 2, 4)
    for a, b, c in np.ndindex(2, 3, 2):
        assert gathered[a, b, c].tolist() == [2 * b, 6 + 2 * b, 1 + 2 * b, 7 + 2 * b]
    shifted = reference.over_mesh(reference.shift, blocks, sizes, "b")
    np.testing.assert_array_equal(shifted, np.roll(blocks, 1, 1))


def test_booleans_are_counted_and_integers_divided():
    total, mean = (reference.all_reduce([np.array([True]), np.array([True])], op=op)[0] for op in ("sum", "mean"))
    assert (total.tolist(), total.dtype, mean.tolist(), mean.dtype) == ([2], np.int32, [1.0], np.float32)
    half = reference.reduce_scatter([np.float16([1, 3]), np.float16([2, 4])], op="mean")
    assert [block.tolist() for block in half] == [[1.5], [3.5]] and half[0].dtype == np.float16
