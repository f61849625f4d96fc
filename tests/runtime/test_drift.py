"""Replica drift: what is planted is seen and named, what is equal is not, and the cost is that of the census."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.runtime import drift
from shardkit.runtime.data.arrays import from_single_device
from shardkit.runtime.data.checksums import shard_checksums
from shardkit.runtime.data.reading import on_mesh
from support.refusals import refused


def planted(mesh, spec, shape, change, at, dtype=np.float32):
    """An array equal on all devices that should hold the same, except the device at these coordinates."""
    whole = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    sharding = NamedSharding(mesh, spec)
    pieces = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        piece = whole[index]
        piece = change(piece.copy()) if device == mesh.devices[at] else piece
        pieces.append(jax.device_put(piece, device))
    return from_single_device(pieces, mesh, spec, shape)


def one_more(piece):
    piece.flat[-1] += 1
    return piece


# proves F16: the leaf and the axis coordinates of a planted difference, per dtype, and nothing without one
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int32, np.uint8, np.float16, np.complex64])
def test_a_planted_difference_is_named(dtype, mesh2x4):
    good = planted(mesh2x4, P(), (3, 5), lambda x: x, (0, 0), dtype)
    bad = planted(mesh2x4, P(), (3, 5), one_more, (1, 2), dtype)
    assert drift.replica_drift({"a": good, "b": good}) == []
    (found,) = drift.replica_drift({"a": good, "b": [bad]})
    assert (found.path, found.coordinates) == ("b.0", {"data": 1, "model": 2})
    assert (found.device, found.process) == (mesh2x4.devices[1, 2].id, 0)
    assert found.checksum != found.expected


# proves F16: only the copies of a piece are compared, along the axes that the spec does not name
def test_a_split_leaf_is_compared_along_the_other_axes(mesh2x4):
    for at in [(0, 1), (1, 3)]:
        found = drift.replica_drift(planted(mesh2x4, P("model"), (8, 2), one_more, at))
        # two copies: which of them is right is not known, so both are named
        assert [f.coordinates for f in found] == [{"data": i, "model": at[1]} for i in (0, 1)]
        assert [f.expected for f in found] == [None, None]
    found = drift.replica_drift(planted(mesh2x4, P("data"), (8, 2), one_more, (1, 3)))
    assert [f.coordinates for f in found] == [{"data": 1, "model": 3}]
    assert drift.replica_drift(planted(mesh2x4, P("data", "model"), (8, 4), one_more, (1, 3))) == []


# proves F16: values that change places, a sign that changes places, one bit, and NaNs of other bits
@pytest.mark.parametrize("what", ["swapped", "signs", "bit", "nan"])
def test_what_a_plain_sum_would_miss(what, data8):
    def change(piece):
        if what == "swapped":
            piece[[1, 3]] = piece[[3, 1]]
        elif what == "signs":  # differ in the top bit alone, which every even weight loses
            piece[5], piece[7] = -piece[5], -piece[7]
        elif what == "bit":
            piece.view(np.uint32)[0] ^= 1
        else:
            piece.view(np.uint32)[2] = 0x7FC00001
        return piece

    (found,) = drift.replica_drift(planted(data8, P(), (8,), change, (6,)))
    assert found.coordinates == {"data": 6}


def test_equal_nans_are_equal(data8):
    def all_nan(piece):
        return np.full_like(piece, np.nan)

    pieces = [jax.device_put(np.full(4, np.nan, np.float32), d) for d in data8.devices.flat]
    assert drift.replica_drift(from_single_device(pieces, data8, P(), (4,))) == []
    (found,) = drift.replica_drift(planted(data8, P(), (4,), all_nan, (1,)))
    assert found.coordinates == {"data": 1}


def test_keys_booleans_scalars_and_empty_leaves(data8):
    def copies(make):
        return [make(i) for i in range(8)]

    def place(values):
        pieces = [jax.device_put(v, d) for v, d in zip(values, data8.devices.flat, strict=True)]
        return from_single_device(pieces, data8, P(), pieces[0].shape)

    tree = {
        "bool": place(copies(lambda i: jnp.array([True, i != 3]))),
        "empty": place(copies(lambda i: jnp.zeros((0, 2)))),
        "key": place(copies(lambda i: jax.random.key(i == 5))),
        "scalar": place(copies(lambda i: jnp.float32(i == 7))),
        "small": place(copies(lambda i: jnp.array([1, 2 + (i == 2)], jnp.int4))),
    }
    assert [(f.path, f.coordinates["data"]) for f in drift.replica_drift(tree)] == [
        ("bool", 3),
        ("key", 5),
        ("scalar", 7),
        ("small", 2),
    ]


def test_a_train_state_has_no_drift_and_padded_leaves_keep_their_names(mesh2x4):
    plan = sk.chain(sk.dp("data"), sk.fsdp("model", min_size=1, uneven="pad"))
    loss_fn = lambda p, batch, keys: jnp.mean((batch["x"] @ p["w"]) ** 2)  # noqa: E731
    init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(0.1, momentum=0.9), mesh=mesh2x4, plan=plan)
    state = init({"w": jnp.ones((7, 3))}, jax.random.key(0))
    state, _ = step(state, {"x": jnp.ones((8, 7))})
    drift.assert_no_drift(state)
    _, leaves = on_mesh("test", state, None)
    assert "params.w" in [path for path, _ in leaves]


def test_the_error_names_leaf_coordinates_and_process(mesh2x4):
    bad = planted(mesh2x4, P(), (3,), one_more, (1, 2))
    (found,) = drift.replica_drift({"w": bad})
    with pytest.raises(drift.DriftError) as error:
        drift.assert_no_drift({"w": bad})
    assert error.value.drifts == [found]
    assert str(error.value) == (
        "assert_no_drift: all replicas of a leaf must have the same bits; w at data=1, model=2 (device "
        f"{found.device}, process 0) has checksum {found.checksum:08x}, and most replicas {found.expected:08x}. "
        "Restore the last checkpoint, and look for a step or collective that only some processes ran."
    )


def test_the_error_lists_eight(data8):
    pieces = [jax.device_put(np.float32([i // 2, i]), d) for i, d in enumerate(data8.devices.flat)]
    bad = from_single_device(pieces, data8, P(), (2,))
    found = drift.replica_drift([bad, bad])
    assert len(found) == 16 and found[0].expected is None
    message = refused(lambda: drift.assert_no_drift([bad, bad]), drift.DriftError)
    assert (
        f"; 0 at data=0 (device 0, process 0) has checksum {found[0].checksum:08x}, and there is no majority; "
        in message
    )
    assert "; and 8 more. Restore" in message


# proves F16: the cost that the docstring gives
def test_the_cost_is_one_gather_of_four_bytes_a_leaf(mesh2x4):
    tree = [planted(mesh2x4, spec, (8, 4), lambda x: x, (0, 0)) for spec in (P(), P("data"), P("data", "model"))]
    specs = tuple(x.sharding.spec for x in tree)
    report = sk.census(lambda leaves: shard_checksums(leaves, mesh=mesh2x4, specs=specs), tree)
    assert report.count() == report.count(kind="all_gather") == 1
    assert report.sent() == 4 * len(tree) * (8 - 1)


def test_nothing_to_compare():
    assert drift.replica_drift({}) == []


def test_leaves_that_are_not_on_the_mesh(data8, mesh2x4):
    for leaf, found in [
        (np.ones(3), "is a ndarray"),
        (jax.device_put(jnp.ones(3), jax.devices()[0]), "has SingleDeviceSharding"),
        (jax.device_put(jnp.ones(3), NamedSharding(data8, P())), "has NamedSharding"),
    ]:
        message = refused(lambda leaf=leaf: drift.replica_drift({"w": leaf}, mesh2x4), TypeError)
        assert message.startswith(f"replica_drift: every leaf must be an array over one mesh; leaf w {found}")
        assert message.endswith(". Create it with from_full(tree, mesh, spec), or remove it from the tree.")
