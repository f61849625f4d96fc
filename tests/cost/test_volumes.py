"""Volumes of model parallelism in closed forms; strategies/ and layers/ hold them to the census of real programs."""

import pytest

from shardkit import cost

pytestmark = pytest.mark.check


def test_tensor_volume_variants():
    def volume(**options):
        return cost.tensor_volume(**{"batch": 2, "sequence": 8, "hidden": 16, "ways": 4} | options)

    reduced = 2 * 3 / 4 * 2 * 8 * 16 * 2
    assert volume() == volume(recompute="selective") == (2 * reduced, 2 * reduced)
    assert volume(ways=1).total == 0 and volume(value_bytes=4) == (4 * reduced, 4 * reduced)
    assert volume(recompute=True) == (2 * reduced, 4 * reduced)
    assert volume(sequence_parallel=True) == volume()  # four gathers and four scatters are four all_reduces
    assert volume(sequence_parallel=True, regather=True) == (2 * reduced, 3 * reduced)
    assert volume(sequence_parallel=True, regather=True, recompute="full") == (2 * reduced, 4 * reduced)


def test_context_volume():
    def volume(method, ways=4, **options):
        return cost.context_volume(batch=2, sequence=64, hidden=32, ways=ways, method=method, **options)

    q = 2 * 16 * 32 * 2  # bytes of the local queries
    assert volume("ring") == (3 * 2 * q, 3 * 2 * q + 4 * 2 * q)
    assert volume("all_gather") == (3 * 2 * q, 2 * 3 * 2 * q)
    assert volume("ulysses") == (3 / 4 * 4 * q, 3 / 4 * 4 * q)
    assert volume("ring", kv_hidden=8) == tuple(v / 4 for v in volume("ring"))
    assert volume("ulysses", kv_hidden=8).forward == 3 / 4 * (2 * q + q / 2)
    assert all(volume(method, ways=1).total == 0 for method in ("ring", "all_gather", "ulysses"))
    # Ulysses, section 3.2: constant where sequence and devices grow together; the ring grows
    assert 0.9 < volume("ulysses", 64).total * 64 / (volume("ulysses", 32).total * 32) < 1.1
    assert volume("ring", 64).total > 0.9 * volume("ring", 32).total


def test_expert_volume():
    assert cost.expert_volume(tokens=10, hidden=4, ways=5) == (2 * 64, 2 * 64)
    assert cost.expert_volume(tokens=10, hidden=4, ways=5, top_k=2, capacity_factor=1.25).forward == 2.5 * 128
