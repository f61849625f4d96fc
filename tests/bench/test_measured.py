"""Links and crossovers from measured times: the figures that went into the times come out."""

import math

import pytest

from shardkit import bench, cost
from shardkit.bench.measured import in_words

pytestmark = pytest.mark.check

HERE = {"date": "2026-11-23T12:00:00+00:00", "device_kind": "TPU v5 lite"}
SIZES = [2**k for k in range(10, 27, 4)]


def measured(latency, bandwidth, *, op="all_reduce", impl="lax", axes="data", n=8, kind=HERE["device_kind"]):
    """Records of `shardkit bench comm` whose times are those of the model."""
    hops, share = (2 * (n - 1), 2 * (n - 1) / n) if op == "all_reduce" else (n - 1, (n - 1) / n)
    return [
        {
            "op": op,
            "impl": impl,
            "axes": axes,
            "n": n,
            "dtype": "float32",
            "size": size,
            "hops": hops,
            "written_bytes": share * size,
            "wall_us_median": 1e6 * (hops * latency + share * size / bandwidth),
            "environment": HERE | {"device_kind": kind},
        }
        for size in SIZES
    ]


def close(link, latency, bandwidth):
    return link.latency == pytest.approx(latency) and link.bandwidth == pytest.approx(bandwidth)


def test_each_axis_has_the_link_that_was_measured_over_it():
    rows = measured(1e-6, 45e9) + measured(1e-6, 45e9, op="all_gather")
    rows += measured(2e-5, 5e9, axes="host", n=2) + measured(1e-8, 1e12, axes="data, host")
    rows += measured(1e-8, 1e12, impl="ring")
    links = bench.links(rows)
    assert close(links.of("data"), 1e-6, 45e9) and close(links.of("host"), 2e-5, 5e9)
    assert links.of("data").source == "measured on 2026-11-23" and links.flops == 197e12
    assert close(bench.links(measured(1e-6, 45e9)).of("another"), 1e-6, 45e9)  # the only one there is
    unknown = measured(1e-6, 1e9, kind="cpu")
    assert bench.links(unknown).flops is None and bench.links(unknown, flops=1e12).flops == 1e12


def test_a_crossover_is_where_the_fitted_times_meet():
    rows = measured(1e-6, 1e9) + measured(2e-6, 4e9, impl="two_step") + measured(2e-6, 0.5e9, impl="ring")
    found = {each.impl: each for each in bench.crossovers(rows)}
    # 14 us and 1.75 bytes/ns against 28 us and 0.4375
    assert found["two_step"] == ("all_reduce", "data", "two_step", pytest.approx(14e-6 / (1.75e-9 - 0.4375e-9)))
    assert found["ring"].size == math.inf
    assert bench.crossovers(measured(1e-6, 1e9, impl="ring")) == []  # nothing to compare with
    assert bench.crossovers(measured(1e-6, 1e9)[:1] + measured(1e-6, 1e9, impl="ring")) == []  # a single size


def test_what_follows_from_links_in_words():
    text = in_words(cost.links("v5e"), {"x": 8})
    assert text.splitlines() == [
        "links of axis 'x', 8 devices: 1 us a message, 45 GB/s (chip v5e)",
        "  collective matmul in rings   from 4,378 bfloat16 columns a device; with twice as many, messages from 44,995 "
        "bytes",
        "  reduce_scatter + all_gather  from 396,000 bytes, for scatter_from=",
        "  buckets                      3,240,000 bytes: latency takes 10% of the time, for bucket_bytes=",
    ]
    rows = measured(1e-6, 1e9, kind="cpu", n=2) + measured(2e-6, 4e9, kind="cpu", n=2, impl="two_step")
    told = in_words(bench.links(rows), {"data": 2}, bench.crossovers(rows))
    assert "unknown: the FLOP/s of a device are not" in told and "never faster, for scatter_from=" in told
    assert "all_reduce by two_step       from 2,667 bytes, as measured" in told


REFUSED = [
    (
        lambda: bench.links([{"benchmark": "guard", "environment": HERE}]),
        "bench.links: records must be of shardkit bench comm, with impl 'lax' over one axis; got none. Run for example "
        "shardkit bench comm data=8 --impl lax --json FILE.",
    ),
    (
        lambda: bench.links([r | {"wall_us_median": 9.0 - i} for i, r in enumerate(measured(1e-6, 1e9))]),
        "bench.links: times must grow with the bytes; over axis 'data' they do not up to 117,440,512 bytes. Measure "
        "larger sizes.",
    ),
]


@pytest.mark.parametrize(("call", "sentence"), REFUSED)
def test_records_that_tell_nothing_of_links_are_refused(call, sentence):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == sentence
