"""The alpha-beta fit: figures that went in come out, noise does not turn them negative, one size is refused."""

import numpy as np
import pytest

from shardkit import bench

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


@pytest.mark.check
@pytest.mark.parametrize(("latency", "bandwidth"), [(1e-6, 45e9), (5e-5, 1e9), (0.0, 1e9)])
def test_the_figures_that_went_in_come_out(latency, bandwidth):
    found = bench.alpha_beta(rows(latency, bandwidth))
    np.testing.assert_allclose(found[:2], (latency, bandwidth), rtol=1e-9, atol=1e-15)
    assert found.residual < 1e-9
    assert found.seconds(14, 4096) == pytest.approx(14 * latency + 4096 / bandwidth)


@pytest.mark.check
def test_small_sizes_count_as_much_as_large_ones():
    """Absolute errors would let the noise of 64 MiB hide the latency of 1 KiB."""
    found = bench.alpha_beta(rows(1e-6, 45e9, noise=0.05))
    np.testing.assert_allclose(found[:2], (1e-6, 45e9), rtol=0.1)
    assert 0.01 < found.residual < 0.1


@pytest.mark.check
def test_no_figure_is_negative():
    """Times that shrink with the size have no bandwidth, and times that grow faster than it no latency."""
    shrinking = [row | {"wall_us_median": 100 - k} for k, row in enumerate(rows(1, 1))]
    assert bench.alpha_beta(shrinking).bandwidth == float("inf")
    assert bench.alpha_beta(shrinking).seconds(14, 1e9) == pytest.approx(96e-6, rel=0.01)
    growing = [row | {"wall_us_median": row["written_bytes"] ** 1.2} for row in rows(1, 1)]
    assert bench.alpha_beta(growing).latency == 0 < bench.alpha_beta(growing).bandwidth < float("inf")


@pytest.mark.check
def test_wrong_and_untimed_rows_are_left_out():
    good = rows(1e-6, 1e9)
    assert bench.alpha_beta([*good, *rows(1, 1, wrong=3), {"hops": None}, {}]) == bench.alpha_beta(good)


@pytest.mark.check
@pytest.mark.parametrize(
    ("given", "said"),
    [([], "0 usable records of 0 sizes"), (rows(1e-6, 1e9)[:1] * 3, "3 usable records of 1 size")],
)
def test_one_size_is_refused(given, said):
    with pytest.raises(ValueError) as error:
        bench.alpha_beta(given)
    assert str(error.value) == (
        f"alpha_beta: records must be of at least two sizes to tell latency from bandwidth; got {said}. Measure "
        "more sizes."
    )
