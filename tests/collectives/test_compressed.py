"""The compressed all_reduce: what is sent and what is kept are together exact, and over steps nothing is lost."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.analysis import census
from shardkit.collectives import compressed

DTYPES = [jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8]
RELATIVE = {"bfloat16": 2**-8, "float8_e4m3fn": 2**-4, "int8": 2**-6}  # of the largest element of a block


def mapped(n, axis="a", **options):
    """x and residual, [n, ...] each, to the sum and the new residual, [n, ...]."""
    sizes = {"a": n} if axis == "a" else {"a": 2, "b": n // 2}
    mesh = sk.make_mesh(jax.devices()[:n], **sizes)

    def device(x, residual):
        x, residual = jax.tree.map(lambda leaf: leaf[0], (x, residual))
        total, residual = compressed.all_reduce(x, axis, residual, **options)
        return total, jax.tree.map(lambda leaf: leaf[None], residual)

    spec = P(axis)
    return jax.jit(jax.shard_map(device, mesh=mesh, in_specs=spec, out_specs=(P(), spec)))


def values(n, size=700, dtype="float32"):
    rng = np.random.default_rng(size)
    x = rng.normal(size=(n, size)) * 10.0 ** rng.integers(-6, 3, (n, size))
    return x.astype(jnp.dtype(dtype)), (rng.normal(size=(n, size)) * 1e-3).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sent_and_kept_are_together_exact(dtype):  # proves F12
    """On one device the sum is what was sent: in float32 it and the residual add up, bit for bit."""
    step = mapped(1, dtype=dtype, block=64)
    x, residual = values(1)
    for turn in range(4):
        wanted = x + residual
        sent, residual = (np.asarray(y) for y in step(x, residual))
        assert (sent[None] + residual).tobytes() == wanted.tobytes(), turn
        np.testing.assert_array_equal(sent[None].astype(np.float64) + residual, wanted.astype(np.float64))
        assert np.abs(residual).max() > 0
        blocks = np.pad(sent, (0, -sent.size % 64)).reshape(-1, 64)
        if dtype == jnp.bfloat16:
            np.testing.assert_array_equal(sent.astype(jnp.bfloat16).astype(np.float32), sent)
        else:  # few different values: sent really went through the small dtype
            most = 127 if dtype == jnp.int8 else 448
            for block in blocks:
                steps = block / np.float32(2 ** np.ceil(np.log2(np.abs(block).max() / most)))
                np.testing.assert_array_equal(steps.astype(jnp.dtype(dtype)).astype(np.float32), steps)
        x = np.roll(x, 1) * np.float32(-1.7)


@pytest.mark.parametrize(("n", "axis"), [(3, "a"), (8, "a"), (8, ("b", "a"))])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum(n, axis, dtype):
    x, residual = values(n)
    order = np.arange(n).reshape(2, -1).T.ravel() if axis == ("b", "a") else np.arange(n)
    for compress_result in (False, True):
        step = mapped(n, axis, dtype=dtype, compress_result=compress_result)
        total, left = (np.asarray(y, np.float64) for y in step(x[order], residual[order]))
        left = left[np.argsort(order)]
        exact = (x + residual).astype(np.float64)
        if not compress_result:  # what arrived and what was kept are what was meant, but for float32's own rounding
            np.testing.assert_allclose(total + left.sum(0), exact.sum(0), rtol=1e-6, atol=2e-6 * np.abs(exact).max())
        bound = np.abs(exact).max() * RELATIVE[jnp.dtype(dtype).name] * (1 + compress_result) * n
        np.testing.assert_allclose(total, exact.sum(0), rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bias_fades_with_feedback_and_stays_without(dtype):  # proves F12
    n, steps = 4, 64
    x = np.linspace(0.1, 1.3, n * 60, dtype=np.float32).reshape(n, 60)
    exact, step = x.astype(np.float64).sum(0), mapped(n, dtype=dtype)

    def biases(feedback):
        residual, total, seen = np.zeros_like(x), 0, []
        for turn in range(1, steps + 1):
            out, left = step(x, residual)
            total = total + np.asarray(out, np.float64)
            seen.append(np.abs(total / turn - exact).max())
            residual = np.asarray(left) if feedback else residual
        return seen

    fed, unfed = biases(True), biases(False)
    assert fed[0] == unfed[0] > 1e-4
    np.testing.assert_allclose(unfed[-1], unfed[0], rtol=1e-3)
    assert fed[-1] < 4 * unfed[0] / steps  # the error of the sum stays that of one step, so the mean's falls as 1/steps


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cost_and_dtype_on_the_wire(n, dtype):
    size, block = 700, 32
    args = [jax.ShapeDtypeStruct((n, size), np.float32)] * 2
    scaled, s = dtype != jnp.bfloat16, jnp.dtype(dtype).itemsize
    unit = n * block if scaled else n
    padded = -(-size // unit) * unit
    first = padded * (n - 1) * (s + 4 / block if scaled else s) / n
    for compress_result, second in ((False, 4 * padded * (n - 1) / n), (True, first)):
        found = census(mapped(n, dtype=dtype, block=block, compress_result=compress_result), *args)
        assert float(found.sent(kind="all_to_all")) == pytest.approx(first, rel=1e-12)
        assert float(found.sent()) == pytest.approx(first + second, rel=1e-12)
        assert [row.bytes_in for row in found.rows][:1] == [s * padded]
    text = str(jax.make_jaxpr(mapped(n, dtype=dtype))(*args))
    name = {"bfloat16": "bf16", "float8_e4m3fn": "f8_e4m3fn", "int8": "i8"}[jnp.dtype(dtype).name]
    assert any(f"{name}[" in line and "= all_to_all" in line for line in text.splitlines())


def test_trees_dtypes_and_types():
    x = {"w": np.ones((2, 3, 4), jnp.bfloat16), "s": [np.full((2,), 3, np.float32), np.zeros((2, 0), np.float32)]}
    mesh = sk.make_mesh(jax.devices()[:2], a=2)

    def device(x):
        x = jax.tree.map(lambda leaf: leaf[0], x)
        residual = compressed.init_residual(x)
        assert {leaf.dtype for leaf in jax.tree.leaves(residual)} == {np.dtype(np.float32)}
        # a loop carries the residual: its type does not change
        return jax.lax.scan(
            lambda left, _: compressed.all_reduce(x, "a", left, dtype=jnp.int8)[::-1], residual, None, length=2
        )[1]

    total = jax.jit(jax.shard_map(device, mesh=mesh, in_specs=P("a"), out_specs=P()))(x)
    assert total["w"].dtype == jnp.bfloat16 and total["w"].shape == (2, 3, 4)
    np.testing.assert_array_equal(total["w"].astype(np.float32), 2)
    assert [leaf.shape for leaf in total["s"]] == [(2,), (2, 0)]
    np.testing.assert_array_equal(total["s"][0], 6)


def test_what_is_not_finite_shows():
    for dtype in DTYPES:
        for bad in (np.inf, np.nan):
            x = np.ones((2, 4), np.float32)
            x[1, 2] = bad
            total, residual = mapped(2, dtype=dtype, block=2)(x, np.zeros_like(x))
            assert not np.isfinite(total[2]) and not np.isfinite(residual[1, 2])
            np.testing.assert_array_equal(total[:2], 2)
            np.testing.assert_array_equal(residual[0], 0)
    # larger than the largest bfloat16: it is sent as that, and the rest is kept
    huge = np.full((1, 1), 3.4e38, np.float32)
    total, residual = mapped(1, dtype=jnp.bfloat16)(huge, np.zeros_like(huge))
    assert np.isfinite(total).all() and np.asarray(total)[None] + np.asarray(residual) == huge


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_is_that_of_the_exact_sum(dtype):
    weights = np.array([1.0, 10, 100], np.float32)
    x, residual = values(3, 6)

    def loss(x, residual):
        total, left = compressed.all_reduce(x, "a", residual, dtype=dtype)
        return jnp.sum(total) * jnp.asarray(weights)[sk.axis_index("a")] + 0 * jnp.sum(left)

    both = partial(jax.grad, argnums=(0, 1))
    mesh = sk.make_mesh(jax.devices()[:3], a=3)
    on_mesh = jax.shard_map(both(loss), mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    for gradient in (jax.jit(on_mesh)(x, residual), jax.jit(jax.vmap(both(loss), axis_name="a"))(x, residual)):
        for leaf in gradient:
            np.testing.assert_array_equal(leaf, np.full((3, 6), 111))
    by_vmap = jax.vmap(lambda x, r: compressed.all_reduce(x, "a", r, dtype=dtype), axis_name="a")(x, residual)
    for got, wanted in zip(by_vmap, mapped(3, dtype=dtype)(x, residual), strict=True):
        np.testing.assert_array_equal(got, np.broadcast_to(wanted, got.shape))
