"""Norms over features, and moments over a batch, that are split: as on one device, and what they send."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.models import blocks
from shardkit.testing import assert_matches_reference
from support.tiers import covered

MESHES = [  # sizes and axis
    ({"model": 1}, "model"),
    ({"model": 3}, "model"),
    ({"model": 8}, "model"),
    ({"data": 2, "model": 4}, "model"),
    ({"model": 2, "data": 2, "other": 2}, ("other", "model")),
]
DTYPES = ["float32", "bfloat16"]


def layer_norm(x, gain, bias):
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean((wide - mean) ** 2, axis=-1, keepdims=True)
    out = ((wide - mean) * jax.lax.rsqrt(variance + 1e-5)).astype(x.dtype)
    return out * gain[None, None] + bias[None, None]


def arguments(features, dtype, offset, seed):
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(2, 6, features)) + offset).astype(np.float32)
    gain, bias = rng.normal(size=(2, features)).astype(np.float32)
    return [each.astype(dtype) for each in (x, gain, bias)]


@pytest.mark.quick("0", "4")
@covered(
    [{"mesh": mesh, "dtype": DTYPES[i % 2], "width": 1 + i % 3, "seed": i} for i, mesh in enumerate(MESHES)],
    mesh=st.sampled_from(MESHES),
    dtype=st.sampled_from(DTYPES),
    width=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_norms_over_split_features_are_those_over_whole_ones(mesh, dtype, width, seed):  # proves F28
    sizes, axis = mesh
    mesh = sk.make_mesh(jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)
    x, gain, bias = arguments(24 * width, dtype, 0, seed)
    rows = P("data" if "data" in sizes else None, None, axis)
    for kernel, reference, args in [
        (sk.layers.sharded_rms_norm, blocks.rms_norm, (x, gain)),
        (sk.layers.sharded_layer_norm, layer_norm, (x, gain, bias)),
    ]:
        options = {"mesh": mesh, "in_specs": (rows, *[P(axis)] * (len(args) - 1)), "out_specs": rows, "args": args}
        assert_matches_reference(
            lambda *args, kernel=kernel: kernel(*args, axis), jax.jit(reference), eager=False, **options
        )
        alone = jax.jit(lambda *args: (kernel(*args, None), reference(*args)))  # one device, no mesh
        found, wanted = alone(*args)
        assert found.dtype == x.dtype
        np.testing.assert_array_equal(found, wanted)


def test_the_result_has_the_dtype_of_the_input():
    """Gains and biases in float32 made the activations of a bfloat16 model float32, layer after layer."""
    x, (gain, bias) = jnp.ones((2, 6, 8), jnp.bfloat16), jnp.ones((2, 8))
    with jax.numpy_dtype_promotion("standard"):  # strict promotion refuses the product
        found = jax.eval_shape(
            lambda: (sk.layers.sharded_rms_norm(x, gain, None), sk.layers.sharded_layer_norm(x, gain, bias, None))
        )
    assert [each.dtype for each in found] == [jnp.bfloat16] * 2


def test_a_large_mean_does_not_cancel():  # proves F28
    mesh = sk.make_mesh(model=8)
    x, gain, bias = arguments(64, "float32", 1e4, 0)
    options = {"in_specs": (P(None, None, "model"), P("model"), P("model")), "out_specs": P(None, None, "model")}
    norm = jax.shard_map(lambda *args: sk.layers.sharded_layer_norm(*args, "model"), mesh=mesh, **options)
    exact = np.asarray(x, np.float64)
    exact = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(exact.var(-1, keepdims=True) + 1e-5)
    exact = exact * np.asarray(gain, np.float64) + np.asarray(bias, np.float64)
    np.testing.assert_allclose(
        jax.jit(norm)(x, gain, bias), exact, atol=5e-3
    )  # E[x^2] - E[x]^2 would be off by 1 and more


def test_moments_of_a_batch_that_is_split_are_two_means():  # proves F28
    """As of a batch norm: `all_reduce(op="mean")` of the means, then of the squared distances from them."""
    mesh = sk.make_mesh(data=4, model=2)
    x = arguments(6, "float32", 3, 1)[0].reshape(12, 6)

    def moments(x):
        mean = sk.all_reduce(jnp.mean(x, axis=0, keepdims=True), "data", op="mean")
        variance = sk.all_reduce(jnp.mean((x - mean) ** 2, axis=0, keepdims=True), "data", op="mean")
        return mean, variance

    def reference(x):
        return jnp.mean(x, axis=0, keepdims=True), jnp.var(x, axis=0, keepdims=True)

    assert_matches_reference(
        moments,
        reference,
        mesh=mesh,
        in_specs=P("data", "model"),
        out_specs=P(None, "model"),  # typed as equal over 'data'
        args=(x,),
        eager=False,
    )


@pytest.mark.parametrize(
    "kernel, arrays, each", [(sk.layers.sharded_rms_norm, 1, 1), (sk.layers.sharded_layer_norm, 2, 2)]
)
@pytest.mark.parametrize("n", [1, 8])
def test_a_norm_sends_its_statistics(kernel, arrays, each, n):
    mesh, tokens = sk.abstract_mesh(model=n), 12
    specs = (P(None, None, "model"), *[P("model")] * arrays)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 6, 16), *[(16,)] * arrays)]

    def total(x, *rest):
        return jnp.sum(kernel(x, *rest, "model").astype(jnp.float32))

    f = jax.shard_map(jax.grad(total), mesh=mesh, in_specs=specs, out_specs=specs[0])
    found = sk.census(f, *shapes)
    assert {row.kind for row in found.rows} == {"all_reduce"} and found.count() == 2 * each
    assert [row.backward for row in found.rows] == [False] * each + [True] * each
    assert found.sent() == 2 * each * 2 * 4 * tokens * (n - 1) / n
