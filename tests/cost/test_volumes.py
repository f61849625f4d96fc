"""Volumes of model parallelism against the census of real programs."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import cost
from shardkit.analysis import census

pytestmark = pytest.mark.check


@pytest.mark.parametrize("n", [1, 4])
def test_tensor_volume_is_what_two_megatron_blocks_send(n):
    b, s, h = 2, 8, 16
    weights = [jax.ShapeDtypeStruct((h, 4 * h), jnp.float32), jax.ShapeDtypeStruct((4 * h, h), jnp.float32)] * 2

    def layer(x, up, down, up2, down2):
        # two blocks, as attention and feed-forward are: matrix by column, matrix by row, all_reduce
        def loss(x):
            for first, last in ((up, down), (up2, down2)):
                x = sk.all_reduce(jnp.tanh(sk.vary(x, "model") @ first) @ last, "model")
            return x.sum()

        return jax.grad(loss)(x)

    mesh = AbstractMesh((n,), ("model",), axis_types=(AxisType.Auto,))
    specs = (P(), P(None, "model"), P("model"), P(None, "model"), P("model"))
    f = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=True)
    found = census(f, jax.ShapeDtypeStruct((b, s, h), jnp.float32), *weights)
    volume = cost.tensor_volume(batch=b, sequence=s, hidden=h, ways=n, value_bytes=4)
    assert float(found.sent()) == volume.total and volume.forward == volume.backward
    backward = sum(r.total for r in found.rows if r.backward)
    assert float(backward) == volume.backward


def test_tensor_volume_variants():
    def volume(**options):
        return cost.tensor_volume(batch=2, sequence=8, hidden=16, ways=4, **options)

    reduced = 2 * 3 / 4 * 2 * 8 * 16 * 2
    assert volume() == volume(recompute="selective") == (2 * reduced, 2 * reduced)
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


def test_ulysses_volume_is_what_its_all_to_alls_send():
    n, b, s, heads, size = 4, 2, 8, 4, 8

    def device(q, k, v):
        def loss(q, k, v):
            q, k, v = (sk.all_to_all(x, "sequence", split_dim=2, concat_dim=1) for x in (q, k, v))
            out = q * jnp.tanh(k) * v
            return sk.all_to_all(out, "sequence", split_dim=1, concat_dim=2).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    mesh = AbstractMesh((n,), ("sequence",), axis_types=(AxisType.Auto,))
    spec = P(None, "sequence")
    f = jax.shard_map(device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True)
    found = census(f, *[jax.ShapeDtypeStruct((b, s, heads, size), jnp.float32)] * 3)
    volume = cost.context_volume(batch=b, sequence=s, hidden=heads * size, ways=n, method="ulysses", value_bytes=4)
    assert float(found.sent()) == volume.total


def test_expert_volume():
    assert cost.expert_volume(tokens=10, hidden=4, ways=5) == (2 * 64, 2 * 64)
    assert cost.expert_volume(tokens=10, hidden=4, ways=5, top_k=2, capacity_factor=1.25).forward == 2.5 * 128
