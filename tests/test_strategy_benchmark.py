"""Whole strategies timed beside each other: the same step as data parallel, in parts, split inside, and as jit's."""

import jax
import pytest

import shardkit as sk
from benchmarks import partitioner
from shardkit import bench
from shardkit.models import transformer

STRATEGIES = {
    "parameters and state whole": ["dp"],
    "all in parts": ["fsdp", "fsdp, by layer"],
    "heads and columns in 8": ["tp"],
}


# proves F83 in part: pipelines are timed separately, in benchmarks/pipeline.py
@pytest.mark.deep
@pytest.mark.parametrize("row", STRATEGIES)
def test_every_strategy_is_timed_against_jit_and_gives_its_numbers(row):
    config = transformer.Config(vocabulary=32, layers=2, dim=16, heads=8, hidden=32)
    each = partitioner.ROWS[row]
    mesh = sk.make_mesh(**each.mesh)
    with jax.numpy_dtype_promotion("standard"):  # optax does not trace under strict promotion
        steps = partitioner.variants(each, mesh, config, examples=mesh.size, tokens=4)
        records = bench.measure("partitioner", row, steps, calls=1, rounds=1, tolerance=1e-4)
    names = [record["case"] for record in records]
    assert names[0] == "jit" and [name for name in names if not name.startswith("jit")] == STRATEGIES[row]
    assert all(record["wall_us_median"] > 0 and record["wall_ratio_median"] > 0 for record in records)
    assert all(record["baseline"] == "jit" for record in records)
