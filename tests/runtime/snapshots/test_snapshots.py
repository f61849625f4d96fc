"""Snapshots of one process: when they are taken, that every plan reads them bit by bit, and what is refused."""

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk
from shardkit.runtime.checkpoint.checkpoints import Checkpoints
from shardkit.runtime.checkpoint.portable import leaves_of, to_portable
from shardkit.runtime.snapshots import folder as files
from shardkit.runtime.snapshots.moving import to_all
from shardkit.runtime.snapshots.planned import Copies, on_host, plan_of, storable
from shardkit.runtime.snapshots.snapshots import Snapshots, restore_newest
from support.checkpoint_rows import KEY, ROWS, make, params

PARAMS = {
    "b": np.arange(7, dtype=np.float32),
    "e": np.zeros((0, 3), np.float32),
    "h": np.arange(8).astype(jnp.float8_e4m3fn),
    "s": np.float32(0.5),
    "w": np.arange(48).reshape(12, 4).astype(jnp.bfloat16),
}
GRAD = sk.value_and_grad(lambda params, batch, keys: sk.Mean.of(params["s"]))


def program(plan=None, **sizes):
    sizes = sizes or {"data": 8}
    mesh = sk.make_mesh(jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)
    return sk.make_train_step(GRAD, optax.sgd(0.1), mesh=mesh, plan=plan or sk.dp("data")).init


def at(state, step):
    return state._replace(step=jax.device_put(jnp.int32(step), state.step.sharding))


@pytest.fixture(scope="module")
def state():
    return program(sk.fsdp("data", min_size=1, uneven="pad"))(PARAMS, KEY)


def bits(state):
    return {path: np.asarray(x).tobytes() for path, x in to_portable(leaves_of("test", state)).items()}


def steps(snapshots):
    return sorted(int(path.name[:10]) for path in snapshots._folder.glob("*"))


def test_another_plan_and_mesh_get_the_same_bits(tmp_path, state):
    # Catches padding that is kept, keys and small floats that lose bits, and pieces in the wrong place.
    target = program(data=2).abstract(PARAMS)
    with Snapshots(every=3, name="a", directory=tmp_path) as snapshots:
        assert snapshots.latest_step() is snapshots.run() is None
        for step in range(1, 11):
            snapshots.save(at(state, step), position=[step], config={"a": 1}, metrics={"loss": 2})
    with Snapshots(every=3, name="a", directory=tmp_path) as snapshots:
        found, run = snapshots.restore(target)
        assert bits(found) == bits(at(state, 9))
        assert (run.step, run.position, run.config, run.metrics) == (9, [9], {"a": 1}, {"loss": 2.0})
        assert run == snapshots.run() and snapshots.latest_step() == 9
        assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, target)
        snapshots.clear()
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_the_newest_two_steps_stay(tmp_path, state):
    # Catches memory that fills up, a step that is looked at in every iteration, and multiples that are missed.
    with Snapshots(every=3, name="a", directory=tmp_path) as snapshots:
        kept = []
        for step in range(2, 12):
            snapshots.save(at(state, step))
            snapshots.wait()
            kept.append(steps(snapshots))
        assert kept == [[], [3], [3], [3], [3, 6], [3, 6], [3, 6], [6, 9], [6, 9], [6, 9]]
        looked = Mock(spec=["__int__"], __int__=Mock(return_value=12))
        snapshots._calls = 3
        for _ in range(2):
            snapshots.save(state._replace(step=looked))
        looked.__int__.assert_not_called()
        snapshots.save(at(state, 13))  # a call was left out
        snapshots.wait()
        assert steps(snapshots) == [9, 13]


def test_a_run_from_the_start_deletes_what_an_earlier_one_left(tmp_path, state):
    # Catches a restart from the future of another run, and a crash while the first step after a restart is written.
    with Snapshots(every=1, name="a", directory=tmp_path) as earlier:
        for step in (7, 8):
            earlier.save(at(state, step))
    with Snapshots(every=1, name="a", directory=tmp_path) as resumed:
        resumed.restore(program(data=2).abstract(PARAMS))
        resumed.save(at(state, 9))
        resumed.wait()
        assert steps(resumed) == [8, 9]
    with Snapshots(every=1, name="a", directory=tmp_path) as anew:
        anew.save(at(state, 1))
        anew.wait()
        assert (steps(anew), anew.latest_step()) == ([1], 1)


def test_a_run_that_goes_back_overwrites_nothing_and_leaves_no_future(tmp_path, state):
    # Catches a step that is kept again in place: a crash meanwhile would leave pieces of two states under one name.
    with Snapshots(every=1, name="a", directory=tmp_path) as snapshots:
        for step in (4, 5):
            snapshots.save(at(state, step))
        snapshots.wait()
        [before] = [path for path in snapshots._folder.glob("*") if path.name.startswith(f"{5:010d}")]
        snapshots.save(at(state, 5))
        snapshots.wait()
        assert steps(snapshots) == [5, 5] and (before / "0.json").exists()
        snapshots.save(at(state, 2))  # from a checkpoint
        snapshots.wait()
        assert (steps(snapshots), snapshots.latest_step()) == ([2], 2)


def damage(snapshots, step):
    [file] = snapshots._folder.glob(f"{step:010d}-*/0.bin")
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])


def test_a_damaged_step_falls_back_to_the_older(tmp_path, state):
    target = program(data=2).abstract(PARAMS)
    with Snapshots(every=1, name="a", directory=tmp_path) as snapshots:
        for step in (1, 2):
            snapshots.save(at(state, step))
        snapshots.wait()
        total = sum(grid.total for grid in snapshots._planned[1].grids.values())
        warning = "restore: step {} in memory has 1 piece on this host damaged and 1 piece of {} lost. It is left out."
        damage(snapshots, 2)
        with pytest.warns(RuntimeWarning) as warned:
            found, run = snapshots.restore(target)
        assert [str(each.message) for each in warned] == [warning.format(2, total)]
        assert (run.step, bits(found)) == (1, bits(at(state, 1)))
        damage(snapshots, 1)
    again = Snapshots(every=1, name="a", directory=tmp_path)
    with pytest.warns(RuntimeWarning) as warned, pytest.raises(ValueError) as error:
        again.restore(target)
    assert [str(each.message) for each in warned] == [warning.format(step, total) for step in (2, 1)]
    assert str(error.value) == (
        f"restore: {str(again._folder)!r} and the other hosts have no whole step. Start with init(params, key), or "
        "restore a checkpoint."
    )


def test_a_snapshot_of_another_model(tmp_path, state):
    with Snapshots(every=1, name="a", directory=tmp_path) as snapshots:
        snapshots.save(at(state, 1))
        with pytest.raises(ValueError) as error:
            snapshots.restore(program(data=2).abstract(PARAMS | {"w": np.zeros((12, 5), jnp.bfloat16)}))
    assert str(error.value) == (
        "restore: step 1 in memory has leaf 'params.w' with shape [12, 4]; this state has [12, 5]. Build the state "
        "with the saved configuration."
    )


def test_a_snapshot_that_cannot_be_written(tmp_path, state, monkeypatch):
    # Catches an error of the background thread that nobody sees; what was saved before must stay.
    with Snapshots(every=1, name="a", directory=tmp_path) as snapshots:
        snapshots.save(at(state, 1))
        snapshots.wait()
        with monkeypatch.context() as full:
            full.setattr(files, "write", Mock(side_effect=OSError(errno.ENOSPC, "full")))
            snapshots.save(at(state, 2))
            with pytest.raises(RuntimeError) as error:
                snapshots.wait()
        assert str(error.value) == (
            f"save: step 2 could not be written to {str(snapshots._folder)!r}: No space left on device. The step "
            "before it is intact; free memory, or pass another directory=."
        )
        assert snapshots.latest_step() == 1


def test_what_devices_receive_is_their_neighbours_and_survives_the_loss_of_a_host(state):
    # Catches a shift over the wrong devices, and shards that the next step overwrites before they are on the host.
    leaves = leaves_of("test", state)
    arrays = to_portable(storable(leaves))
    plan = plan_of(leaves, arrays, lambda device: str(device.id // 2))
    sent = {list(arrays)[leaf] for leaf in plan.sharing.sent}
    assert sent == {path for path, x in arrays.items() if not x.is_fully_replicated}
    whole = sorted(number for number, _ in Copies(plan_of(leaves, arrays, lambda device: "one host"), arrays))
    assert whole == list(range(sum(grid.total for grid in plan.grids.values())))
    expected = dict(Copies(plan_of(leaves, arrays, lambda device: "one host"), arrays))
    copies = list(Copies(plan, arrays))
    assert len(copies) == len(plan.sharing.kept) > len(whole)
    for number, piece in copies:
        assert piece.tobytes() == expected[number].tobytes()


def test_copies_outlive_a_donated_state():
    # Catches numpy arrays that are views of a CPU device's memory.
    init = program(data=2)
    state = init(PARAMS, KEY)
    leaves = leaves_of("test", state)
    arrays = to_portable(storable(leaves))
    copies = Copies(plan_of(leaves, arrays, lambda device: "one host"), arrays)
    before = {number: piece.tobytes() for number, piece in copies._own}
    jax.jit(lambda x: x + 1, donate_argnums=0)(state.params["b"]).block_until_ready()
    assert {number: piece.tobytes() for number, piece in copies} == before
    theirs = [np.asarray(shard.data) for shard in state.params["w"].addressable_shards]
    assert not any(np.shares_memory(piece, each) for _, piece in copies for each in theirs)


def test_pieces_are_sent_in_chunks_of_any_size():
    # Catches a piece that is cut at the end of a chunk and put together wrongly.
    pieces = [np.arange(size, dtype=np.uint8) + index for index, size in enumerate((5, 0, 17, 1))]
    own = {index: (lambda piece=piece: piece) for index, piece in enumerate(pieces)}
    for chunk in (4, 8, 64):
        found = to_all([piece.size for piece in pieces], own, {0, 1, 2}, chunk=chunk)
        assert {index: bytes(piece) for index, piece in found.items()} == {n: bytes(pieces[n]) for n in range(3)}


@pytest.mark.check
def test_what_is_offloaded_to_the_host_is_copied():
    # Catches an optimizer state in the host's memory, of which the next step would overwrite the snapshot's view.
    class Shard(np.ndarray):
        def devices(self):
            return {Mock(platform=self.platform)}

    shard = np.arange(3).view(Shard)
    for platform, kind, shares in (("gpu", "device", True), ("gpu", "pinned_host", False), ("cpu", None, False)):
        shard.platform, shard.sharding = platform, Mock(memory_kind=kind)
        assert np.shares_memory(on_host(shard), shard) == shares


@pytest.mark.check
@pytest.mark.parametrize(
    ("memory", "disk", "intact", "read"),
    [
        (3, 2, 2, "memory"),
        (3, 3, 3, "memory"),
        (2, 3, 3, "disk"),
        (2, 3, 2, "disk"),
        (None, 2, 1, "disk"),
        (2, None, None, "memory"),
        (2, 3, 1, "memory"),
    ],
)
def test_the_newer_of_memory_and_disk(memory, disk, intact, read):
    # Catches steps that are lost because the older of the two is read, also when the newest on disk is damaged.
    snapshots, checkpoints = Mock(spec=Snapshots), Mock(spec=Checkpoints)
    snapshots.latest_step.return_value, checkpoints.latest_step.return_value = memory, disk
    target, checkpoints.restore.return_value = Mock(spec=sk.TrainState), (None, Mock(step=intact))
    found = restore_newest(target, snapshots, checkpoints, residuals="reset")
    if read == "memory":
        assert found is snapshots.restore.return_value
        snapshots.restore.assert_called_once_with(target, residuals="reset")
    else:
        assert found is checkpoints.restore.return_value
        checkpoints.restore.assert_called_once_with(target, residuals="reset", damaged="older")


@pytest.mark.check
def test_neither_in_memory_nor_on_disk():
    nothing = Mock(spec=Snapshots), Mock(spec=Checkpoints)
    for each in nothing:
        each.latest_step.return_value = None
    assert restore_newest(Mock(spec=sk.TrainState), *nothing) is None


@pytest.mark.deep  # rows that repeat the path of the first test
@pytest.mark.parametrize("source", ROWS)
def test_every_plan_reads_every_plan(source, tmp_path):
    # Catches layers in the order of stages, and padding of one plan that another does not have.
    saved = make(source).init(params(), KEY)
    with Snapshots(every=1, name="a", directory=tmp_path) as snapshots:
        snapshots.save(saved)
        for target in ("one device", "fsdp padded", "unequal stages, fsdp padded"):
            found, _ = snapshots.restore(make(target).init.abstract(params()))
            assert bits(found) == bits(saved), target


def test_memory_is_that_of_the_machine():
    # Catches a default directory on a disk.
    assert files.MEMORY == "/dev/shm" or not Path("/dev/shm").exists()
    if Path("/proc/mounts").exists() and os.path.ismount(files.MEMORY):
        assert f" {files.MEMORY} tmpfs " in Path("/proc/mounts").read_text()
