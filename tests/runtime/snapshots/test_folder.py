"""The folder of a job's snapshots: whose it is, what is written, and what damage is noticed."""

import os
import stat
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from shardkit.runtime.cluster.memory import JOB, job_of
from shardkit.runtime.monitor.hello import TOKEN
from shardkit.runtime.snapshots import folder as files
from shardkit.runtime.snapshots.snapshots import Snapshots

pytestmark = pytest.mark.check


def refusal(**arguments):
    with pytest.raises(ValueError) as error:
        Snapshots(every=1, **arguments)
    return str(error.value)


def test_a_job_is_recognized_by_its_token_or_a_name(tmp_path, monkeypatch):
    # Catches two jobs that find each other's snapshots, and a token that can be read from a folder's name.
    for variable in (TOKEN, JOB):
        monkeypatch.delenv(variable, raising=False)
    assert refusal(directory=tmp_path) == (
        "Snapshots: a job must be recognized when it starts again; got neither name= nor SHARDKIT_JOB nor "
        "SHARDKIT_JOB_TOKEN in the environment. Start it with shardkit launch --restarts, or pass name=."
    )
    assert refusal(directory=tmp_path, name="../a") == (
        "Snapshots: name must have 1 to 100 ASCII letters, digits, dots, dashes and underscores; got '../a'. Pass for "
        "example name='run-7'."
    )
    assert "must have 1 to 100" in refusal(directory=tmp_path, name="ä" * 100)  # no file name has as many bytes
    assert "must have 1 to 100" in refusal(directory=tmp_path, name="a\n")
    monkeypatch.setenv(TOKEN, "secret")
    first = files.folder_of(tmp_path, None)
    monkeypatch.setenv(TOKEN, "secret2")
    assert len({first.parent, files.folder_of(tmp_path, None).parent, files.folder_of(tmp_path, "secret").parent}) == 3
    monkeypatch.setenv(JOB, job_of({TOKEN: "secret"}))  # before the token, of which each attempt may have another
    assert files.folder_of(tmp_path, None) == first
    assert "secret" not in str(first.relative_to(tmp_path)) + os.environ[JOB]


def test_only_this_user_can_read_or_replace_it(tmp_path):
    # Catches a folder that another user has made before, for example as a link to his own.
    files.folder_of(tmp_path, "a")
    folder = tmp_path / f"shardkit-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    alone = "Snapshots: the folder of snapshots must be this user's alone;"
    folder.chmod(0o770)
    assert refusal(directory=tmp_path, name="a") == (
        f"{alone} {str(folder)!r} has mode 770. Remove it, or pass another directory=."
    )
    folder.rmdir()
    folder.write_text("")
    assert refusal(directory=tmp_path, name="a") == (
        f"{alone} {str(folder)!r} is not a directory. Remove it, or pass another directory=."
    )
    folder.unlink()
    folder.symlink_to(tmp_path)
    assert refusal(directory=tmp_path, name="a") == (
        f"{alone} {str(folder)!r} is a link. Remove it, or pass another directory=."
    )


def test_a_directory_in_which_others_can_replace_it(tmp_path):
    tmp_path.chmod(0o777)
    assert refusal(directory=tmp_path, name="a") == (
        f"Snapshots: others must not be able to replace files in the directory; {str(tmp_path)!r} has mode 777. Pass a "
        "directory= of your own, or set its sticky bit with chmod +t."
    )
    tmp_path.chmod(0o1777)
    files.folder_of(tmp_path, "a")
    assert refusal(directory=tmp_path / "b", name="a") == (
        f"Snapshots: directory must be a writable directory, in memory; got {str(tmp_path / 'b')!r}. Pass directory=, "
        "for example a tmpfs."
    )


def test_too_little_memory(tmp_path, monkeypatch):
    # Catches memory that is full in the middle of training; what a restart finds there is used again.
    system = os.statvfs_result((512, 512, 8, 4, 2, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: system)
    (tmp_path / "old").write_bytes(bytes(100))
    files.check_room(tmp_path, 1124)
    with pytest.raises(ValueError) as error:
        files.check_room(tmp_path, 1125)
    assert str(error.value) == (
        f"save: two snapshots, 1,125 bytes on this host, must fit into {str(tmp_path)!r}; it has 1,124 bytes. Enlarge "
        "it, for a container with --shm-size, or pass another directory= or more hosts."
    )


PIECES = {
    3: np.arange(6, dtype=np.float32).reshape(2, 3),
    0: np.float32(2.5),
    1: np.zeros((0, 2), np.float32),
    7: np.arange(3).astype(ml_dtypes.bfloat16),
}


def test_what_is_written_is_read_again(tmp_path):
    files.write(tmp_path / "step", 0, {"a": 1}, list(PIECES.items())[:2])
    files.write(tmp_path / "step", 1, {"a": 1}, list(PIECES.items())[2:])
    stored = files.steps_of(tmp_path)["step"]
    assert stored.document == {"a": 1}
    assert files.intact(stored.places) == set(PIECES)
    for number, place in stored.places.items():
        assert place.read().tobytes() == PIECES[number].tobytes()


@pytest.mark.parametrize("damage", ["bit", "cut", "gone", "record", "unfinished"])
def test_damage_is_noticed(tmp_path, damage):
    # Catches a piece that is restored although its bytes changed, and one whose record was never finished.
    files.write(tmp_path / "step", 0, {}, PIECES.items())
    data, record = tmp_path / "step" / "0.bin", tmp_path / "step" / "0.json"
    if damage == "bit":
        data.write_bytes(bytes([data.read_bytes()[0] ^ 1]) + data.read_bytes()[1:])
    elif damage == "cut":
        data.write_bytes(data.read_bytes()[:20])
    elif damage == "gone":
        data.unlink()
    elif damage == "record":
        record.write_text(record.read_text().replace("[3, 0,", "[3, 4,"))
    else:
        record.rename(record.with_suffix(".json.part"))
    stored = files.steps_of(tmp_path)
    right = files.intact(stored["step"].places) if stored else set()
    assert right == {"bit": {0, 1, 7}, "cut": {1}, "gone": {1}}.get(damage, set())


def test_other_steps_are_deleted(tmp_path):
    # Catches memory that fills with steps of an earlier attempt.
    for name in ("1", "2", "3"):
        files.write(tmp_path / "job" / "host" / name, 0, {}, PIECES.items())
    files.delete_others(tmp_path / "job" / "host", {"2", "3"})
    assert sorted(files.steps_of(tmp_path / "job" / "host")) == ["2", "3"]
    files.delete(tmp_path / "job" / "host")
    assert not (tmp_path / "job").exists()


def test_a_step_that_is_deleted_meanwhile_does_not_count_against_the_room(tmp_path, monkeypatch):
    # Catches a resumed job that ends at its first snapshot, as another process of its host deletes the older ones then.
    old = tmp_path / "old"
    old.write_bytes(bytes(100))
    system = os.statvfs_result((512, 512, 8, 4, 2, 0, 0, 0, 0, 255))
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda path: old.unlink() or system)
        files.check_room(tmp_path, 1124)
        patched.setattr(os, "statvfs", lambda path: system)
        patched.setattr(os, "walk", lambda folder: [(folder, [], ["old"])])  # it was there a moment ago
        files.check_room(tmp_path, 1024)


def test_hosts_have_names_and_folders_of_their_own(tmp_path, monkeypatch):
    # Catches containers of one machine that are taken for one host, though each has a memory of its own.
    monkeypatch.delenv(files.HOST, raising=False)
    folder = files.folder_of(tmp_path, "a")
    alone = files.host_id(folder), folder
    assert alone[0] != files.host_id(Path("/proc/job/host"))
    monkeypatch.setenv(files.HOST, "b")
    assert files.host_id(folder) == "b" != alone[0]
    assert files.folder_of(tmp_path, "a").parent == alone[1].parent
    assert files.folder_of(tmp_path, "a") != alone[1]
