"""The alpha-beta fit: figures that went in come out, noise does not turn them negative, one size is refused."""

import math

import numpy as np
import pytest
from hypothesis import strategies as st

from shardkit import bench
from shardkit.bench.fit import alpha_beta
from support.refusals import refused

pytestmark = pytest.mark.check

LATENCY = st.floats(1e-7, 1e-3)
BANDWIDTH = st.floats(1e6, 1e12)
SIZES = [1 << k for k in range(10, 27, 2)]


def rows(latency, bandwidth, noise=0.0, hops=14, **fields):
    generator = np.random.default_rng(0)
    return [
        {
            "hops": hops,
            "written_bytes": size,
            "wall_us_median": 1e6 * (hops * latency + size / bandwidth) * (1 + noise * generator.normal()),
            **fields,
        }
        for size in SIZES
    ]


@pytest.mark.parametrize(("latency", "bandwidth"), [(1e-6, 45e9), (5e-5, 1e9), (0.0, 1e9)])
def test_the_figures_that_went_in_come_out(latency, bandwidth):
    found = alpha_beta(rows(latency, bandwidth))
    np.testing.assert_allclose(found[:2], (latency, bandwidth), rtol=1e-9, atol=1e-15)
    assert found.residual < 1e-9
    assert found.seconds(14, 4096) == pytest.approx(14 * latency + 4096 / bandwidth)


def test_small_sizes_count_as_much_as_large_ones_and_no_figure_is_negative():
    """Absolute errors would let the noise of 64 MiB hide the latency of 1 KiB."""
    found = alpha_beta(rows(1e-6, 45e9, noise=0.05))
    np.testing.assert_allclose(found[:2], (1e-6, 45e9), rtol=0.1)
    assert 0.01 < found.residual < 0.1
    # Times that shrink with the size have no bandwidth, and times that grow faster than it no latency.
    shrinking = [row | {"wall_us_median": 100 - k} for k, row in enumerate(rows(1, 1))]
    assert alpha_beta(shrinking).bandwidth == float("inf")
    assert alpha_beta(shrinking).seconds(14, 1e9) == pytest.approx(96e-6, rel=0.01)
    growing = [row | {"wall_us_median": row["written_bytes"] ** 1.2} for row in rows(1, 1)]
    assert alpha_beta(growing).latency == 0 < alpha_beta(growing).bandwidth < float("inf")


@pytest.mark.parametrize("power", [1.2, -0.1])
def test_the_figure_that_is_left_has_the_least_relative_error(power):
    records = [row | {"wall_us_median": row["written_bytes"] ** power} for row in rows(1, 1)]
    found = alpha_beta(records)

    def error(fit):
        times = [(r["wall_us_median"] / 1e6, fit.seconds(r["hops"], r["written_bytes"])) for r in records]
        return math.sqrt(sum((fitted / measured - 1) ** 2 for measured, fitted in times) / len(times))

    assert error(found) == pytest.approx(found.residual)
    for factor in (0.99, 1.01):
        assert (
            error(found._replace(latency=factor * found.latency, bandwidth=factor * found.bandwidth)) > found.residual
        )


def test_wrong_and_untimed_rows_are_left_out():
    good = rows(1e-6, 1e9)
    assert alpha_beta([*good, *rows(1, 1, wrong=3), {"hops": None}, {}]) == alpha_beta(good)


@pytest.mark.parametrize(
    ("given", "said"), [([], "0 usable records of 0 sizes"), (rows(1e-6, 1e9)[:1] * 3, "3 usable records of 1 size")]
)
def test_one_size_is_refused(given, said):
    assert refused(lambda: alpha_beta(given)) == (
        f"alpha_beta: records must be of at least two sizes to tell latency from bandwidth; got {said}. Measure "
        "more sizes."
    )


# ---- links

HERE = {"date": "2026-11-23T12:00:00+00:00", "device_kind": "TPU v5 lite"}
LARGE = [2**k for k in range(10, 27, 4)]


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
        for size in LARGE
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


REFUSED = {
    "bench.links: records must be of shardkit bench comm, with impl 'lax' over one axis; got none. Run for example "
    "shardkit bench comm data=8 --impl lax --json FILE.": lambda: bench.links(
        [{"benchmark": "guard", "environment": HERE}]
    ),
    "bench.links: times must grow with the bytes; over axis 'data' they do not up to 117,440,512 bytes. Measure "
    "larger sizes.": lambda: bench.links([r | {"wall_us_median": 9.0 - i} for i, r in enumerate(measured(1e-6, 1e9))]),
}


@pytest.mark.parametrize("sentence, call", REFUSED.items())
def test_records_that_tell_nothing_of_links_are_refused(call, sentence):
    assert refused(call) == sentence
