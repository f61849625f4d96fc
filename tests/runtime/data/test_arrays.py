"""Global arrays in one process: the three ways in, what is refused before anything is sent, and the way back."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.meshes.layout import canonical
from shardkit.on_device.batch import batch_specs
from shardkit.runtime.data import arrays, reading
from support.refusals import value_error


def make_batch(rows=16):
    return {
        "scale": np.float32(0.5),
        "tokens": np.arange(rows * 8, dtype=np.int32).reshape(rows, 8),
        "weight": np.arange(rows, dtype=np.float32),
    }


# proves S112
def test_from_full_places_what_every_process_holds(mesh2x4):
    tree = {**make_batch(), "key": jax.random.split(jax.random.key(0), 4), "double": np.ones((4, 4)), "number": 3}
    specs = {name: P("data", "model") for name in tree}
    out = arrays.from_full(tree, mesh2x4, specs)
    assert {name: x.sharding.spec for name, x in out.items()} == {
        "double": P("data", "model"),
        "key": P("data"),
        "number": P(),
        "scale": P(),
        "tokens": P("data", "model"),
        "weight": P("data"),
    }
    np.testing.assert_array_equal(jax.random.key_data(out["key"]), jax.random.key_data(tree["key"]))
    assert out["double"].dtype == np.float32 and out["number"].dtype == np.int32
    for name in ("double", "number", "scale", "tokens", "weight"):
        assert not out[name].weak_type
        np.testing.assert_array_equal(out[name], tree[name])


# proves F64: the batch is laid out as the step lays it out, so that the step takes it without moving it
@pytest.mark.parametrize("plan", ["dp", "dp + cp", "cp"])
def test_a_batch_from_its_rows_lies_as_the_step_wants_it(plan, mesh2x4):
    mesh = sk.make_mesh(data=2, context=4)
    plans = {"dp": sk.dp("data"), "cp": sk.cp("context"), "dp + cp": sk.chain(sk.dp("data"), sk.cp("context"))}
    spec = plans[plan].batch_spec(mesh)
    batch = make_batch()
    out = arrays.from_process_local(batch, mesh, spec, batch=16)
    expected = jax.tree.map(canonical, batch_specs(batch, spec, mesh, 1))
    assert jax.tree.map(lambda x: x.sharding.spec, out) == expected
    jax.tree.map(np.testing.assert_array_equal, out, batch)


# proves S114
def test_from_single_device_takes_the_pieces_as_they_are(mesh2x4):
    whole = np.arange(32.0, dtype=np.float32).reshape(4, 8)
    sharding = NamedSharding(mesh2x4, P("data", "model"))
    pieces = [jax.device_put(whole[index], d) for d, index in sharding.devices_indices_map(whole.shape).items()]
    out = arrays.from_single_device(pieces[::-1], mesh2x4, P("data", "model"), (4, 8))
    np.testing.assert_array_equal(out, whole)
    assert out.sharding == sharding
    pointers = {piece.unsafe_buffer_pointer() for piece in pieces}
    assert {shard.data.unsafe_buffer_pointer() for shard in out.addressable_shards} == pointers


# proves S106
def test_local_shards_are_what_each_device_holds_and_fetch_gives_the_whole(mesh2x4):
    x = sk.shard(np.arange(8.0, dtype=np.float32), mesh2x4, P("model"))
    held = reading.local_shards(x)
    assert list(held) == [shard.device for shard in x.addressable_shards] and len(held) == 8
    for (_, model), device in np.ndenumerate(mesh2x4.devices):
        np.testing.assert_array_equal(held[device], [2 * model, 2 * model + 1])
    keys = arrays.from_full(jax.random.key(3), mesh2x4, P())
    assert all(value.dtype == np.uint32 for value in reading.local_shards(keys).values())
    tree = {"w": sk.shard(np.arange(8.0, dtype=np.float32), mesh2x4, P("model")), "key": jax.random.key(1), "n": 3}
    out = reading.fetch(tree)
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(out))
    np.testing.assert_array_equal(out["w"], np.arange(8.0))
    np.testing.assert_array_equal(out["key"], jax.random.key_data(jax.random.key(1)))


def test_replicate_and_print(mesh2x4, capsys):
    x = sk.shard(np.arange(4.0, dtype=np.float32), mesh2x4, P("model"))
    out = reading.replicate({"w": x, "host": np.int32(3)}, mesh2x4)
    assert all(y.sharding.is_fully_replicated and len(y.addressable_shards) == 8 for y in jax.tree.leaves(out))
    reading.print_global({"w": x})
    assert capsys.readouterr().out == f"{ {'w': np.arange(4.0, dtype=np.float32)} }\n"


def test_local_rows_are_those_of_this_process(mesh2x4):
    np.testing.assert_array_equal(arrays.local_rows(6, mesh2x4, P("data")), np.arange(6))
    np.testing.assert_array_equal(arrays.local_rows(3, mesh2x4, P()), np.arange(3))
    np.testing.assert_array_equal(arrays.local_rows(3, mesh2x4, P(None, "model")), np.arange(3))


def refused(wording, fn, *args, **options):
    with value_error(wording):
        fn(*args, **options)


@pytest.mark.check
def test_an_abstract_mesh_holds_no_array_and_a_print_waits_for_some_time():
    x, there = np.ones(8), {"mesh": sk.abstract_mesh(data=8), "spec": P("data")}
    wording = "{}: the mesh must have devices; got abstract data=8. Pass sk.make_mesh(data=8)."
    given = {"from_full": (x,), "from_process_local": (x,), "local_rows": (8,), "from_rows": (x, np.arange(8), 8)}
    for name, args in given.items():
        refused(wording.format(name), getattr(arrays, name), *args, **there)
    refused(wording.format("replicate"), reading.replicate, x, there["mesh"])
    # refused alone too, where nothing waits
    refused(
        "print_global: timeout must be 0 or more; got -1. Pass for example timeout=1.",
        reading.print_global,
        1,
        timeout=-1,
    )


# proves S115: every refusal comes before anything is placed, let alone sent
def test_what_does_not_divide(data8, mesh2x4):
    refused(
        "from_full: leaf tokens: dim 0 must be divisible by axis 'data'; got size 12 over 8 devices. Pad dim 0 or "
        "choose another dim.",
        *(arrays.from_full, make_batch(12), data8, P("data")),
    )
    refused(
        "local_rows: the batch must be divisible by axis 'data'; got 12 rows over 8 devices. Pass another batch, or "
        "pad with examples of weight 0.",
        *(arrays.local_rows, 12, data8, P("data")),
    )
    refused(
        "from_process_local: a process's rows must divide over its parts of axes 'data', 'model'; leaf tokens has 12 "
        "rows for 8 of 8 parts. Pass another number of rows, or pad with examples of weight 0.",
        *(arrays.from_process_local, make_batch(12), mesh2x4, P(("data", "model"))),
    )
    refused(
        "from_process_local: each process must pass its share of the batch; leaf tokens has 8 rows, and 8 of 8 parts "
        "of 16 rows are 16. Pass the rows of local_rows(batch, mesh, spec).",
        *(arrays.from_process_local, make_batch(8), data8, P("data")),
        batch=16,
    )
    refused(
        "from_process_local: each process must pass its share of the batch; leaf weight has 8 rows, and 8 of 8 parts "
        "of 16 rows are 16. Pass the rows of local_rows(batch, mesh, spec).",
        *(arrays.from_process_local, {"tokens": np.zeros((16, 2)), "weight": np.zeros(8)}, data8, P("data")),
    )
    refused(
        "from_process_local: leaf tokens: dim 1 must be divisible by axis 'model'; got size 6 over 4 devices. Pad dim "
        "1 or choose another dim.",
        *(arrays.from_process_local, {"tokens": np.zeros((4, 6), np.int32)}, mesh2x4, P("data", "model")),
    )


# numpy's integers have 64 bits unless asked otherwise, jax's 32: what does not fit would come out as another number
def test_integers_that_are_too_large_for_jax(data8):
    ids = np.arange(8) + 2**40
    refused(
        "from_full: leaf ids: int64 values must fit jax's int32; got 1099511627776. Pass smaller "
        "numbers, or set jax_enable_x64.",
        *(arrays.from_full, {"ids": ids}, data8, P("data")),
    )
    refused(
        "from_process_local: uint64 values must fit jax's uint32; got 1099511627783. Pass smaller "
        "numbers, or set jax_enable_x64.",
        *(arrays.from_process_local, np.where(ids % 2, ids, 0).astype(np.uint64), data8, P("data")),
    )
    extremes = np.array([-(2**31), 2**31 - 1] * 4)
    np.testing.assert_array_equal(arrays.from_full(extremes, data8, P("data")), extremes)


def test_pieces_that_do_not_fit(data8):
    pieces = [jax.device_put(np.float32([i]), d) for i, d in enumerate(data8.devices.flat)]
    refused(
        "from_single_device: there must be one shard on each of this process's devices of the mesh, [0, 1, 2, 3, 4, 5, "
        "6, 7]; got shards on [0, 1, 2, 3, 4, 5, 6]. Put each on its device with jax.device_put(shard, device).",
        *(arrays.from_single_device, pieces[:-1], data8, P("data"), (8,)),
    )
    wrong = [*pieces[:-1], jax.device_put(np.int32([7]), data8.devices.flat[7])]
    refused(
        f"from_single_device: every shard must be float32[1], by {P('data')} of [8]; got int32[1] on "
        f"{data8.devices.flat[7]}. Pass such a shard, or another shape or dtype.",
        *(arrays.from_single_device, wrong, data8, P("data"), (8,)),
    )
    refused(
        "from_single_device: dim 0 must be divisible by axis 'data'; got size 9 over 8 devices. Pad dim 0 or choose "
        "another dim.",
        *(arrays.from_single_device, pieces, data8, P("data"), (9,)),
    )
