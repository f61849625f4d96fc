"""Snapshots of several processes, as on hosts of their own: one is lost, and the others go on from memory."""

import json
import os
import shutil
from pathlib import Path

import pytest

from shardkit.runtime.cluster import memory
from shardkit.runtime.cluster.launch import launch
from shardkit.runtime.cluster.memory import JOB
from shardkit.runtime.snapshots.folder import HOST, folder_of
from support.jobs import PATH

CHILD = Path(__file__).parents[2] / "support" / "snapshot_child.py"


def run(tmp_path, place, hosts, **options):
    """What each process saw."""
    reports = tmp_path / "reports"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir()
    what = {"memory": str(place), "reports": str(reports), "hosts": hosts, **options}
    environ = os.environ | {"PYTHONPATH": PATH, JOB: "of this test"}
    assert launch([str(CHILD), json.dumps(what)], processes=len(hosts), devices=1, environ=environ) == 0
    return [json.loads((reports / f"{index}.json").read_text()) for index in range(len(hosts))]


def lose(place, host, monkeypatch):
    """Deletes what a host has in its memory."""
    monkeypatch.setenv(JOB, "of this test")
    monkeypatch.setenv(HOST, host)
    shutil.rmtree(folder_of(place, None))


@pytest.mark.deep  # real processes
@pytest.mark.parametrize("lost", range(4))
def test_after_the_loss_of_any_host_the_rest_or_a_new_one_goes_on(lost, tmp_path, monkeypatch):
    # Catches a shard of which no other host has a copy, and bits that change on the way to a new mesh.
    place, hosts = tmp_path / "memory", list("abcd")
    place.mkdir()
    kept = run(tmp_path, place, hosts, steps=6)[0]["kept"]
    lose(place, hosts[lost], monkeypatch)
    left = [host for host in hosts if host != hosts[lost]]
    shutil.copytree(place, tmp_path / "again")
    for seen in run(tmp_path, place, left, steps=8):
        assert (seen["resumed"], seen["began"]) == (6, kept["6"])
    new = [*left[:2], "e", *left[2:]]
    for seen in run(tmp_path, tmp_path / "again", new, steps=8, plan="dp"):
        assert (seen["resumed"], seen["began"]) == (6, kept["6"])


@pytest.mark.deep  # real processes
def test_two_processes_of_one_host_share_what_is_whole_on_it(tmp_path, monkeypatch):
    # Catches processes of one host that each keep all, and a lost host of which only one process has a copy.
    place = tmp_path / "memory"
    place.mkdir()
    kept = run(tmp_path, place, list("aabb"), steps=4)[0]["kept"]
    monkeypatch.setenv(JOB, "of this test")
    monkeypatch.setenv(HOST, "a")
    numbers = [
        row[0]
        for file in folder_of(place, None).glob("0000000004-*/*.json")
        for row in json.loads(file.read_text().partition("\n")[2])["pieces"]
    ]
    assert len(set(numbers)) == len(numbers)
    lose(place, "b", monkeypatch)
    [seen] = run(tmp_path, place, ["a"], steps=4)
    assert (seen["resumed"], seen["began"]) == (4, kept["4"])


@pytest.mark.deep  # real processes
def test_a_host_that_did_not_finish_a_step_leaves_the_one_before_it(tmp_path, monkeypatch):
    # Catches a restart from a step that is whole on some hosts only, and processes that choose different steps.
    place = tmp_path / "memory"
    place.mkdir()
    kept = run(tmp_path, place, list("abc"), steps=6)[0]["kept"]
    monkeypatch.setenv(JOB, "of this test")
    for host in "ab":  # a and b have their copies of it, and c has one of b's
        monkeypatch.setenv(HOST, host)
        [step] = folder_of(place, None).glob("0000000006-*")
        shutil.rmtree(step)
    for seen in run(tmp_path, place, list("abc"), steps=6):
        assert (seen["resumed"], seen["began"]) == (4, kept["4"])


def test_all_attempts_of_a_job_have_one_name_and_leave_nothing(tmp_path, monkeypatch):
    # Catches a restart that cannot find the snapshots of the attempt before it, and memory that a job leaves for ever.
    monkeypatch.setattr(memory, "MEMORY", str(tmp_path))
    monkeypatch.setenv(JOB, "given")
    given = folder_of(tmp_path, None)
    given.mkdir(parents=True)
    monkeypatch.delenv(JOB)
    write = f"mkdir -p {given.parents[1]}/job-$(printf %s ${JOB} | sha256sum | head -c 32)"
    command = ["sh", "-c", f"echo ${JOB} >> {tmp_path}/names; {write}; exit 1"]
    assert launch(command, processes=2, restarts=1) == 1
    names = (tmp_path / "names").read_text().split()
    assert len(names) == 4 and len(set(names)) == 1 and len(names[0]) == 64
    assert list(given.parents[1].iterdir()) == [given.parent]
    assert launch(command, processes=1, environ={**os.environ, JOB: "given"}) == 1
    assert given.exists()
