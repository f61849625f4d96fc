"""Files in pieces, read into the memory where they stay, and checksums that a save does not wait for."""

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardkit as sk
from shardkit.runtime.checkpoint import checkpoints as module
from shardkit.runtime.checkpoint import orbax_io, reading
from shardkit.runtime.checkpoint.checkpoints import Checkpoints, latest_step
from shardkit.runtime.checkpoint.portable import describe_leaf
from shardkit.runtime.checkpoint.record import make_record, seal
from shardkit.runtime.data import checksums
from support.checkpoint_runs import restored, save
from support.refusals import refused

DATA, WHOLE = PartitionSpec("data"), PartitionSpec()


def state_of(**params: Any) -> sk.TrainState:
    mesh = sk.make_mesh(data=2, model=4)
    lay = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    return sk.TrainState(lay(jnp.int32(1), WHOLE), {name: lay(*x) for name, x in params.items()}, (), None)


def test_a_save_does_not_wait_for_its_checksums(tmp_path, monkeypatch):
    """It took ten times as long as orbax alone; and without them, the step must not count."""
    state, wait = state_of(w=(jnp.arange(8.0), DATA)), threading.Event()
    start = checksums.start_checksums

    def late(arrays: Any) -> Callable[[], Any]:
        started = start(arrays)
        return lambda: wait.wait(60) and started()

    monkeypatch.setattr(module, "start_checksums", late)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        assert latest_step(tmp_path) is None
        wait.set()
        checkpoints.wait()
    np.testing.assert_array_equal(restored(tmp_path, state)[0].params["w"], np.arange(8.0))


# A checksum that cannot be computed, in the background, would leave a step that nothing reads, without a word.
def test_checksums_that_fail_are_a_save_that_failed(tmp_path, monkeypatch):
    def fail() -> dict[str, int]:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(module, "start_checksums", lambda arrays: fail)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state_of(w=(jnp.ones(8), DATA)))
    assert refused(lambda: checkpoints.wait(), RuntimeError) == (
        f"save: step 1 could not be written to '{tmp_path}': RESOURCE_EXHAUSTED: Out of memory. No finished step is "
        "there; free or repair the disk, then save again."
    )
    assert latest_step(tmp_path) is None


# Of pieces that a target's parts cut, or of too many at once, nothing else would tell.
def test_files_in_pieces_are_read_a_few_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(orbax_io, "_PIECES", (64, 64))
    monkeypatch.setattr(reading, "_UNDERWAY", 128)
    x, y = (np.random.default_rng(0).normal(size=size).astype(np.float32) for size in ((12, 16), (8, 4)))
    save(tmp_path, state_of(x=(x, PartitionSpec("model")), y=(y, DATA)))
    begin, underway, most = reading._Part.pieces, [0], [0]

    def counted(part: Any) -> Any:
        for size, copy in begin(part):
            yield size, lambda size=size, copy=copy: Copying(size, copy(), underway, most)

    monkeypatch.setattr(reading._Part, "pieces", counted)
    target = state_of(x=(x * 0, PartitionSpec("data", "model")), y=(y * 0, PartitionSpec("model")))
    found = restored(tmp_path, target)[0]
    np.testing.assert_array_equal(found.params["x"], x)
    np.testing.assert_array_equal(found.params["y"], y)
    assert (max(most), underway) == (128, [0])


class Copying:
    """A piece on its way, and how many bytes are."""

    def __init__(self, size: int, copied: Any, underway: list[int], most: list[int]):
        self.size, self.copied, self.underway = size, copied, underway
        underway[0] += size
        most.append(underway[0])

    def result(self) -> None:
        self.copied.result()
        self.underway[0] -= self.size


# Read into one buffer and copied into another, a restore took two and a half times the memory of the state.
def test_a_restore_reads_into_the_memory_where_it_stays(tmp_path, monkeypatch):
    state, buffers, aligned = state_of(w=(jnp.arange(4096.0), DATA)), [], reading._allocate
    directory = tmp_path / "a%20b#c|d"  # a URL with this path is refused, or is that of another directory
    save(directory, state)
    monkeypatch.setattr(reading, "_allocate", lambda *of: (buffers.append(aligned(*of)), buffers[-1])[1])
    found = restored(directory, state)[0].params["w"]
    ours = {buffer.ctypes.data for buffer in buffers}
    assert {shard.data.unsafe_buffer_pointer() for shard in found.addressable_shards} <= ours
    spent = jax.jit(lambda x: x + 1, donate_argnums=0)(found)
    np.testing.assert_array_equal(np.concatenate([x for x in buffers if x.size > 1]), np.arange(4096.0))  # not reused
    np.testing.assert_array_equal(spent, np.arange(4096.0) + 1)


# As all were until shardkit wrote in pieces: those of earlier versions must stay readable.
def test_what_was_written_whole_and_compressed_is_read(tmp_path):
    state = state_of(w=(jnp.arange(64.0).reshape(8, 8), PartitionSpec("data", "model")))
    arrays = {"step": state.step, "params.w": state.params["w"]}
    record = make_record(1, 5, None, None, {path: describe_leaf(x) for path, x in arrays.items()})
    seal(record, checksums.checksums(arrays))
    ocp.save(tmp_path / "1", arrays, custom_metadata=record)
    found, run = restored(tmp_path, state)
    assert run.position == 5
    np.testing.assert_array_equal(found.params["w"], state.params["w"])


@pytest.mark.deep  # a benchmark that does not run tells nothing
def test_the_benchmark_runs(tmp_path):
    command = [sys.executable, "-m", "benchmarks.checkpoint", "--quick", "--json", str(tmp_path / "out.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "| orbax |" in done.stdout and "| shardkit |" in done.stdout
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 8
