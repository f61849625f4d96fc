"""Replay: what is planted in a step, in its repetition or in memory is named; what is right is not."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.runtime import replay
from support.planted.corrupted import RIGHT, flip_in_memory
from support.planted.corrupted import small as build


@pytest.fixture(scope="module")
def mesh():
    return sk.make_mesh(jax.devices()[:4], data=2, model=2)


def first_state(mesh):
    return sk.runtime.from_full({"w": np.arange(8, dtype=np.float32).reshape(2, 4) / 8}, mesh, P(None, "model"))


def first_batch(mesh):
    return sk.runtime.from_full(np.arange(8, dtype=np.float32).reshape(4, 2) / 4, mesh, P("data"))


def says(step, state, batch):
    with pytest.raises(replay.CorruptionError) as error:
        step(state, batch)
    return str(error.value), error.value.corruptions


# A step without a fault must pass on every call, and give the numbers of the plain step: replays donate only copies.
def test_a_right_step_is_what_it_was(mesh):
    calls, built = [], []
    plain, other = build(mesh), lambda mesh: built.append(len(calls)) or build(mesh)
    watched = replay.Replay(plain, other, mesh=mesh, every=3, first_step=1)
    state, other, batch = first_state(mesh), first_state(mesh), first_batch(mesh)
    for _ in range(5):
        state, metrics = plain(state, batch)
        calls.append(1)
        other, watched_metrics = watched(other, batch)
    watched.check()
    np.testing.assert_array_equal(state["w"], other["w"])
    assert metrics["loss"] == watched_metrics["loss"]
    assert built == [2]  # at the third step, whose number was 2, counted from 0; and kept for the sixth


# A fault of one device spreads by the reduction, so that only the search among the devices can name it.
@pytest.mark.parametrize("where", ["gradient", pytest.param("flight", marks=pytest.mark.deep)])
def test_a_permanent_fault_is_named(where, mesh):
    bad = mesh.devices[1, 0]
    broken = lambda mesh: build(mesh, bad, where)  # noqa: E731
    words, found = says(
        replay.Replay(broken(mesh), broken, mesh=mesh, every=1, first_step=57), first_state(mesh), first_batch(mesh)
    )
    assert [(each.path, each.devices, each.processes, each.cause) for each in found] == [
        ("w", (bad.id,), (0,), "permanent")
    ]
    assert found[0].coordinates == ({} if where == "gradient" else {"data": 1, "model": 0})
    place = "w" if where == "gradient" else "w at data=1, model=0"
    assert words == (
        "Replay: a step must have the same bits whichever device computes which shard; step 57 has other bits in "
        f"{place}, which device {bad.id} (process 0) gives each time. Restore the last checkpoint, and take the device "
        "out of the mesh."
    )


# What happens once is in the step or in its repetition: only the first has spoiled the state. Its place names it.
@pytest.mark.parametrize("cause", ["step", pytest.param("replay", marks=pytest.mark.deep)])
def test_a_fault_that_occurs_once_is_named_where_it_has_not_spread(cause, mesh):
    bad = mesh.devices[0, 1]
    faults = iter([bad])
    if cause == "step":
        step = replay.Replay(build(mesh, bad, "flight"), build, mesh=mesh, every=1)
    else:
        once = lambda mesh: build(mesh, next(faults, RIGHT), "flight")  # noqa: E731
        step = replay.Replay(build(mesh), once, mesh=mesh, every=1)
        step._steps = _Forgetful()  # the program with the fault is built once
    words, (found,) = says(step, first_state(mesh), first_batch(mesh))
    at = {"data": 0, "model": 1} if cause == "step" else {"data": 0, "model": 0}  # each works for the one before it
    assert found == replay.Corruption("w", at, (bad.id,), (0,), cause)
    told = "step 0 had" if cause == "step" else "the replay of step 0 had"
    right = "" if cause == "step" else "; the step was right"
    assert words == (
        f"Replay: a step must have the same bits whichever device computes which shard; {told} other bits once in w "
        f"at data=0, model={at['model']}, by a fault of device {bad.id} (process 0){right}. Restore the last "
        "checkpoint; if it happens again, take the device out of the mesh."
    )


class _Forgetful(dict):
    def __setitem__(self, key, value):
        pass


# A leaf without replicas, changed while nothing runs: only checksums from before tell. The step with it is known.
def test_a_bit_that_flips_in_memory_is_named(mesh):
    step = replay.Replay(build(mesh), build, mesh=mesh, every=100)
    state, batch = first_state(mesh), first_batch(mesh)
    flip_in_memory(state["w"], mesh.devices[1, 1], 3)  # before the first step nothing is known of it
    for index in range(3):
        state, _ = step(state, batch)
        if index == 1:
            jax.block_until_ready(step._returned[1])  # its checksums, or they would be of the changed state
            flip_in_memory(state["w"], mesh.devices[1, 1], 70)
    with pytest.raises(replay.CorruptionError) as error:
        step.check()
    (found,) = error.value.corruptions
    assert found == replay.Corruption("w", {"data": 1, "model": 1}, (mesh.devices[1, 1].id,), (0,), "stored")
    assert str(error.value) == (
        "Replay: a state must keep its bits between two steps; before step 2 they changed in w at data=1, model=1, on "
        f"device {found.devices[0]} (process 0). Restore the last checkpoint; if it happens again, take the device out "
        "of the mesh."
    )
    step.check()  # said once


# A state that was restored or changed on purpose is no fault.
def test_another_state_is_none_that_changed(mesh):
    step = replay.Replay(build(mesh), build, mesh=mesh, every=100)
    batch = first_batch(mesh)
    step(first_state(mesh), batch)
    step(first_state(mesh), batch)
    step.check()


ALL = [jnp.float32, jnp.bfloat16, jnp.int8, jnp.bool_, jnp.complex64, jnp.float8_e4m3fn, jnp.uint32]
SPECS = [P("data"), P(None, "model"), P("data", "model"), P(("model", "data")), P(), P("model"), P(None, "data")]


# Every dtype and layout is sent with its bits: a repetition from other bits would always differ, or never.
@pytest.mark.parametrize("dtypes", [[jnp.bfloat16], pytest.param(ALL, marks=pytest.mark.deep)], ids=["one", "all"])
def test_arrays_are_sent_bit_by_bit(dtypes, mesh):
    order, numbers = (2, 0, 3, 1), np.arange(16).reshape(4, 4)
    pairs = zip([numbers.astype(dtype) for dtype in dtypes], SPECS, strict=False)
    tree = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs]
    for x in (jax.random.key(3), np.float32(2)):
        tree.append(jax.device_put(x, NamedSharding(mesh, P())))
    *got, other = replay.sent([*tree, numbers], order)
    assert other is numbers
    for before, after in zip(tree, got, strict=True):
        assert after.dtype == before.dtype
        assert after.sharding == NamedSharding(replay.exchanged(mesh, order), before.sharding.spec)
    sums, sums_there = replay._checksums(tree)[1], replay._checksums(got)[1]
    np.testing.assert_array_equal(sums, sums_there)
    assert [device.id for device in replay.exchanged(mesh, order).devices.flat] == [2, 0, 3, 1]


# Every device of every count is found by halving, and a program whose bits depend on the order accuses none.
@pytest.mark.check
def test_the_search_finds_each_device():
    for count in range(3, 18):
        for bad in range(count):
            asked = []

            def differs(order, bad=bad, asked=asked):
                assert sorted(order) == list(range(len(order)))
                asked.append(order)
                return order[bad] != bad

            assert replay._permanent(count, differs) == (bad,)
            assert len(asked) <= (count - 1).bit_length() + 1  # the docstring's cost
        assert replay._permanent(count, lambda order: True) == ()
    assert replay._permanent(2, lambda order: True) == (0, 1)


# The decision, over all outcomes of the runs: each cause from bits alone, without a program.
@pytest.mark.check
@pytest.mark.parametrize(
    ("bits", "cause", "devices"),
    [
        ([0, 0], None, None),
        ([1, 0, 0], "step", (2,)),
        ([1, 2, 3], "unrepeatable", ()),
        ([0, 1, 0, 0], "replay", (0,)),
        ([0, 1, 0, 2], "unrepeatable", ()),
        ([0, 1, 0, 1, *itertools.repeat(1, 3)], "order", ()),
    ],
)
def test_the_cause(bits, cause, devices):
    step = replay.Replay.__new__(replay.Replay)
    line = sk.make_mesh(jax.devices()[:3], data=3)
    step._mesh, step._rotated = line, (1, 2, 0)
    runs = iter([_table(value) for value in bits])
    taken = ["w", "b"], next(runs)
    step._taken = lambda order, kept, batch: next(runs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "_bits", lambda table: (["w", "b"], table))
        found = step._search(None, None, taken)
    assert next(runs, None) is None
    assert [(each.path, each.cause, each.devices) for each in found] == ([("b", cause, devices)] if cause else [])


def _table(value):
    table = np.zeros((3, 2), np.uint32)
    table[2 if value == 1 else 0, 1] = value
    return table


@pytest.mark.check
def test_the_words_for_what_names_no_device():
    step = replay.Replay.__new__(replay.Replay)
    leaves = [replay.Corruption(f"w{k}", {}, (), (), "order") for k in range(10)]
    with pytest.raises(replay.CorruptionError) as error:
        step._raise(3, leaves)
    assert str(error.value) == (
        "Replay: a step must have the same bits whichever device computes which shard; step 3 has other bits "
        "whichever devices are exchanged, in w0; w1; w2; w3; w4; w5; w6; w7; and 2 more. On GPUs set "
        "XLA_FLAGS=--xla_gpu_deterministic_ops=true; pass rotate=False where sums depend on the order of devices, or "
        "build the step with deterministic."
    )
    with pytest.raises(replay.CorruptionError) as error:
        step._raise(3, [leaf._replace(cause="unrepeatable") for leaf in leaves[:1]])
    assert str(error.value) == (
        "Replay: a step must have the same bits each time; step 3 has other bits on the same devices too, in w0. "
        "On GPUs set XLA_FLAGS=--xla_gpu_deterministic_ops=true; else restore the last checkpoint, and test the "
        "devices one by one."
    )
    spread = [replay.Corruption("w", {}, (), (), "step"), replay.Corruption("b", {"data": 1}, (4, 5), (0, 1), "step")]
    with pytest.raises(replay.CorruptionError) as error:
        step._raise(3, spread)
    assert "had other bits once in w; b at data=1, device 4 (process 0) or device 5 (process 1). Restore" in str(
        error.value
    )
    with pytest.raises(replay.CorruptionError) as error:
        step._raise(3, spread[:1])
    assert "had other bits once in w, by a fault of a device that cannot be told. Restore" in str(error.value)
