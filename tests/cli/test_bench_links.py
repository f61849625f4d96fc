"""`shardkit bench links` as a user types it: what is refused before anything is made, and the table of a run."""

import os

import jax
import pytest

from shardkit import bench
from shardkit.bench import namespaces, throttle
from shardkit.cli.bench import links

pytestmark = pytest.mark.check


@pytest.fixture
def run(inside, monkeypatch):
    monkeypatch.setattr(links, "offer_cpu_devices", lambda n: None)
    return lambda *words, code: inside("bench", "links", *words, code=code)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--rate", "100mbit", "fast"],
            "the rate must be a number and kbit, mbit or gbit; got 'fast'. Write for example 100mbit.",
        ),
        (["--sizes", "1M", "4X"], "a size must be bytes, such as 256K, 4M or 1000; got '4X'. Correct --sizes."),
        (["--sizes", "0K"], "a size must be bytes, such as 256K, 4M or 1000; got '0K'. Correct --sizes."),
    ],
)
def test_bad_input_is_one_sentence(run, words, sentence):
    assert run(*words, code=2).stderr == f"error: bench links: {sentence}\n"


def test_without_root_it_is_one_sentence(run, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: None if name == "tc" else name)
    assert run("--quick", code=2).stderr == (
        "error: bench links: it makes network namespaces, which needs root and the commands ip, tc, unshare; missing: "
        "root (this is user 1000), the command tc. Run it as root with iproute2 and util-linux installed.\n"
    )


@pytest.mark.parametrize("wrong", [0, 1])
def test_it_measures_each_rate_and_prints_what_crossed(run, monkeypatch, tmp_path, wrong):
    """The run itself is that of tests/bench/test_throttle.py."""
    asked = []

    def throttled(**what):
        asked.append(what)
        one = {"format": bench.FORMAT, "version": 1, "benchmark": "links", "row": "r", "case": "plain", "wrong": wrong}
        one |= {f"wall_us_{q}": 2e4 for q in ("median", "p10", "p90")} | {"wall_ratio_median": 1.0, "achieved": 0.75}
        one |= {"link_bytes": 2e6, "link_bytes_expected": 1.5e6, "expected_us": 1.5e4, "bytes": 1 << 20}
        return [one | {"rate": what["rate"], "environment": {}}]

    monkeypatch.setattr(bench, "throttled", throttled)
    done = run("--rate", "10mbit", "1gbit", "--sizes", "4K", "1M", "--json", tmp_path / "links.jsonl", code=wrong)
    assert asked == [{"rate": rate, "devices": 2, "sizes": [4096, 2**20], "rounds": 7} for rate in ("10mbit", "1gbit")]
    assert throttle.LABEL in done.stdout and "simulated devices share" not in done.stdout
    [row] = [line for line in done.stdout.splitlines() if line.startswith("10mbit")]
    assert row.split() == [
        "10mbit",
        "1,048,576",
        "plain",
        "20.0",
        "[20.0,",
        "20.0]",
        "1.00",
        "2.00",
        "1.50",
        "15.0",
        "75%",
    ]
    assert [r["rate"] for r in bench.read(tmp_path / "links.jsonl")] == ["10mbit", "1gbit"]
    run("--quick", code=wrong)
    assert asked[2:] == [{"rate": "100mbit", "devices": 2, "sizes": [2**18], "rounds": 2}]
    assert jax.device_count() == 8
