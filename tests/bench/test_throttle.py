"""A throttled link between network namespaces: what is run to make it, what must cross it, and one real run."""

import os
import subprocess
from fractions import Fraction

import jax
import numpy as np
import pytest

import shardkit as sk
from shardkit.bench import namespaces, throttle

PAIR = namespaces.Pair(("left", "right"), ("l0", "r0"))


@pytest.mark.check
def test_the_commands_make_two_hosts_and_throttle_both_ends():
    lines = [" ".join(command) for command in namespaces.commands(PAIR, "100mbit")]
    assert lines == [
        "ip netns add left",
        "ip netns add right",
        "ip link add l0 netns left type veth peer name r0 netns right",
        "ip -n left addr add 10.77.0.1/24 dev l0",
        "ip -n left link set l0 up",
        "ip -n left link set lo up",
        "tc -n left qdisc add dev l0 root tbf rate 100mbit burst 16384b limit 4mb",
        "ip -n right addr add 10.77.0.2/24 dev r0",
        "ip -n right link set r0 up",
        "ip -n right link set lo up",
        "tc -n right qdisc add dev r0 root tbf rate 100mbit burst 16384b limit 4mb",
    ]
    assert namespaces.commands(PAIR, "1gbit")[-1][-4:] == ["burst", "125000b", "limit", "4mb"]  # a millisecond
    assert namespaces.removal(PAIR) == [["ip", "netns", "delete", "left"], ["ip", "netns", "delete", "right"]]
    assert all(len(end) < 16 for end in namespaces.pair_of(4194304).ends)  # what Linux allows


@pytest.mark.check
def test_rates():
    assert [namespaces.bits(rate) for rate in ("100mbit", "1gbit", "2.5Gbit", "56kbit")] == [1e8, 1e9, 2.5e9, 56e3]
    for wrong in ("100", "0mbit", "fast", "1gbps", ""):
        with pytest.raises(ValueError) as error:
            namespaces.bits(wrong)
        assert str(error.value) == (
            f"bench links: the rate must be a number and kbit, mbit or gbit; got {wrong!r}. Write for example 100mbit."
        )


@pytest.mark.check
def test_without_root_and_commands_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RuntimeError) as error, namespaces.made("100mbit"):
        pass
    assert str(error.value) == (
        "bench links: it makes network namespaces, which needs root and the commands ip, tc, unshare; missing: root "
        "(this is user 1000), the command ip, the command tc, the command unshare. Run it as root with iproute2 and "
        "util-linux installed."
    )


@pytest.mark.check
@pytest.mark.parametrize("ended", [None, KeyboardInterrupt, RuntimeError])
def test_what_was_made_is_removed_however_it_ends(monkeypatch, ended):
    """Ctrl-C, an error of a process, and a command in the middle that the system refuses."""
    ran = []

    def run(command, **_):
        ran.append(" ".join(command))
        return subprocess.CompletedProcess(command, "tbf" in ran[-1] and ended is RuntimeError, "", "unknown qdisc")

    monkeypatch.setattr(namespaces, "missing", lambda: "")
    monkeypatch.setattr(subprocess, "run", run)
    try:
        with namespaces.made("1gbit") as pair:
            assert pair == namespaces.pair_of(os.getpid())
            if ended:
                raise ended
    except (KeyboardInterrupt, RuntimeError) as error:
        assert isinstance(error, ended)
        if ended is RuntimeError:
            assert str(error) == (
                f"bench links: the system must allow network namespaces and tbf queues; {ran[-3]!r} failed: unknown "
                "qdisc. Run it on a machine or in a container that does."
            )
    assert ran[-2:] == [" ".join(command) for command in namespaces.removal(namespaces.pair_of(os.getpid()))]


@pytest.mark.check
def test_what_a_killed_run_left_is_removed_by_the_next(monkeypatch):
    gone = subprocess.Popen(["true"])
    gone.wait()
    listed = (
        f"shardkit-links-{gone.pid}-a (id: 1)\nshardkit-links-{gone.pid}-b\nshardkit-links-1-a\nanother-{gone.pid}-a\n"
    )
    ran = []

    def run(command, **_):
        ran.append(command)
        return subprocess.CompletedProcess(command, 0, listed, "")

    monkeypatch.setattr(subprocess, "run", run)
    namespaces._remove_leftovers()
    assert ran == [["ip", "netns", "list"], *namespaces.removal(namespaces.pair_of(gone.pid))]


@pytest.mark.check
@pytest.mark.parametrize(
    ("code", "raised", "sentence"),
    [
        (1, RuntimeError, "bench links: a process ended with exit code 1: ValueError: a mistake"),
        (137, RuntimeError, "bench links: signal 9 ended the run; nothing is reported. Run it again."),
        (130, KeyboardInterrupt, ""),
    ],
)
def test_how_the_two_processes_ended_is_told(monkeypatch, tmp_path, code, raised, sentence):
    """And each is started in its own namespace, with its own name and a table of both names."""
    launched = {}

    def launch(command, **options):
        launched.update(options, command=command)
        (tmp_path / "1.log").write_text("I0000 an error that is none\nValueError: a mistake\nbye\n")
        return code

    monkeypatch.setattr(namespaces.runtime, "launch", launch)
    with pytest.raises(raised) as error:
        namespaces.run(PAIR, "some.module", tmp_path, devices=3)
    assert str(error.value) == sentence
    assert launched["processes"] == 2 and launched["devices"] == 3
    assert launched["command"][3:6] == [str(tmp_path), "left", "right"]
    assert (tmp_path / "hosts").read_text() == "127.0.0.1 localhost\n10.77.0.1 host0\n10.77.0.2 host1\n"


@pytest.mark.check
@pytest.mark.parametrize("local", [1, 2, 4])
def test_what_crosses_by_the_census(local):
    """Of S bytes on each of n devices; by hand, with the ring host by host and all_to_all between all pairs."""
    mesh, size = sk.abstract_mesh(host=2, local=local), 2**20
    x = jax.ShapeDtypeStruct((2 * local, size // 4), "float32")

    def across(name):
        kernel = jax.shard_map(
            lambda x: throttle.WAYS[name](x[0]), mesh=mesh, in_specs=jax.P(("host", "local")), out_specs=jax.P()
        )
        rows = sk.census(kernel, x).rows
        return float(sum(throttle.crossing(row.kind, row.axes, row.total, local) for row in rows))

    n = 2 * local
    assert across("plain") == 2 * (n - 1) / n * size
    assert across("hierarchical") == size
    assert across("hierarchical, bfloat16") == size / 2
    # a chunk of every device to each of the other host's, then the sums once round
    assert across("bfloat16") == local * local * size / n / 2 + (n - 1) / n * size / 2
    assert across("hierarchical, int8") == pytest.approx(size / 4, rel=0.02)  # and a scale for every 256


@pytest.mark.check
def test_over_the_host_axis_every_device_sends_to_its_partner():
    assert throttle.crossing("all_to_all", ("host",), Fraction(7), 4) == 28
    assert throttle.crossing("all_gather", ("local",), Fraction(7), 4) == 0
    assert throttle.crossing("all_to_all", ("host", "local"), Fraction(7), 4) == 16  # four of seven messages, of four


@pytest.mark.check
def test_the_expected_time_by_hand():
    """12.5 MB at 100 Mbit/s take a second, but for the 16 KiB of the queue; at 1 Gbit/s its burst is a millisecond."""
    told = throttle.expected_seconds(12.5e6, 6, "100mbit", call=0.1, message=0.01)
    assert told == pytest.approx(0.1 + 0.06 + 1 - 16384 / 12.5e6)
    assert throttle.expected_seconds(125e6, 0, "1gbit", call=0, message=0) == pytest.approx(1 - 0.001)
    assert throttle.expected_seconds(1e3, 2, "1gbit", call=0, message=1e-3) == 2e-3


def test_every_way_has_the_exact_sum():
    """The ways and the numbers that are sent, which bfloat16 and int8 hold exactly; on one host's devices."""
    mesh = sk.make_mesh(jax.devices()[:4], host=2, local=2)
    x, expected = throttle.operand(mesh, 640)
    assert len({tuple(row) for row in np.asarray(x)}) == 3 and np.abs(expected).max() == 127 * 8

    def every(x):
        return [way(x[0]) for way in throttle.WAYS.values()]

    spec = jax.P(("host", "local"))
    for out in jax.jit(jax.shard_map(every, mesh=mesh, in_specs=spec, out_specs=jax.P()))(x):
        np.testing.assert_array_equal(out, expected)


@pytest.mark.check
def test_a_round_takes_as_long_as_on_the_host_that_comes_last():
    """The other one waits for it, which is no time of the link."""

    def host(wall, link):
        samples = {"wall_us": wall, "cpu_us": [10.0, 20.0], "calibration_cpu_us": [1, 1]}
        one = {"case": "plain", "baseline": "plain", "rounds": 2, "samples": samples, "wrong": 1, "environment": {}}
        return [one | {"link_bytes": link, "expected_us": 40.0}]

    [merged] = throttle._merged(host([100.0, 80.0], 1000.0), host([90.0, 120.0], 1100.0))
    assert merged["samples"]["wall_us"] == [90.0, 80.0] and merged["samples"]["cpu_us"] == [20.0, 40.0]
    assert merged["wall_us_median"] == 85.0 and merged["achieved"] == round(40 / 85, 4)
    assert merged["wrong"] == 2 and merged["link_bytes"] == 1050


# ---- a real run


@pytest.mark.deep  # it starts two processes, that compile six programs
def test_over_a_real_link_bytes_are_those_of_the_census_and_two_levels_win():
    if lacks := namespaces.missing():
        pytest.skip(f"network namespaces need {lacks}")
    try:
        with namespaces.made("100mbit"):
            pass
    except RuntimeError as error:
        pytest.skip(str(error))
    records = {r["case"]: r for r in throttle.throttled(rate="50mbit", sizes=[2**20], rounds=3)}
    assert list(records) == list(throttle.WAYS)
    for name, r in records.items():
        assert r["wrong"] == 0, name
        assert 1 < r["link_bytes"] / r["link_bytes_expected"] < 1.3, name  # headers, and answers to what comes
        assert (r["link_bytes_expected"] - namespaces.burst("50mbit")) * 8 / 50e6 < r["wall_us_median"] / 1e6, name
    assert records["plain"]["achieved"] > 0.5
    assert records["hierarchical"]["wall_ratio_median"] < 1 and records["hierarchical, int8"]["wall_ratio_median"] < 0.6
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"shardkit-links-{os.getpid()}" not in left
