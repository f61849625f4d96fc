"""Convolutions and pooling in a proof: against jax for drawn parameters, and proofs of sharded ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardkit.testing.exact.field import Exact, Field
from shardkit.testing.exact.interpreter import Interpreter

SEEDS = range(100)
FEW = [str(seed) for seed in range(20)]


def whole(rng, shape):
    """Small whole numbers, many of them equal."""
    return rng.integers(-3, 4, shape).astype(np.float32)


def means_what_jax_computes(function, *args):
    """The numbers are jax's integers modulo primes, the real values are its floats, and no sign is wrong."""
    field = Field(2, 3)
    found = Interpreter(field).run(jax.make_jaxpr(function)(*args), [field.lifted(x) for x in args])
    for x, wanted in zip(found, jax.tree.leaves(jax.jit(function)(*args)), strict=True):
        wanted = np.asarray(wanted)
        x = x if isinstance(x, Exact) else field.lifted(x)
        assert x.shape == wanted.shape
        assert field.same(x, field.lifted(wanted)).all()
        np.testing.assert_array_equal(x.real[0], wanted)
        assert not (x.sign * np.sign(wanted) < 0).any()


def with_gradients(function):
    """`(cotangents, *args) -> results, gradients`."""

    def both(cotangents, *args):
        results, pull = jax.vjp(function, *args)
        return results, pull(cotangents)

    return both


def drawn_convolution(seed):
    """A convolution and its operands: any layout, strides, dilations, padding, groups of features or of the batch."""
    rng = np.random.default_rng(seed)
    dims = rng.integers(0, 4)
    features, batches = [(1, 1), (rng.integers(1, 4), 1), (1, rng.integers(1, 4))][rng.integers(3)]
    channels, sizes, reads = rng.integers(1, 3), rng.integers(1, 6, dims), rng.integers(1, 4, dims)
    if seed % 10 == 9:
        sizes[:1] = 0
    x = whole(rng, (rng.integers(1, 3) * batches, channels * features, *sizes))
    kernel = whole(rng, (rng.integers(1, 3) * features * batches, channels, *reads))
    orders = [tuple(int(dim) for dim in rng.permutation(dims + 2)) for _ in range(3)]
    options = {
        "window_strides": rng.integers(1, 4, dims).tolist(),
        "padding": rng.integers(-1, 4, (dims, 2)).tolist(),
        "lhs_dilation": rng.integers(1, 4, dims).tolist(),
        "rhs_dilation": rng.integers(1, 3, dims).tolist(),
        "dimension_numbers": lax.ConvDimensionNumbers(*orders),
        "feature_group_count": int(features),
        "batch_group_count": int(batches),
    }
    args = x.transpose(np.argsort(orders[0])), kernel.transpose(np.argsort(orders[1]))
    return lambda x, kernel: lax.conv_general_dilated(x, kernel, **options), args


# proves N49
@pytest.mark.quick(*FEW)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_convolution_means_what_jax_computes(seed):
    convolve, args = drawn_convolution(seed)
    cotangents = whole(np.random.default_rng(seed), jax.eval_shape(convolve, *args).shape)
    means_what_jax_computes(with_gradients(convolve), cotangents, *args)


def drawn_windows(seed):
    """An array, and windows of it: any sizes, strides, dilations and padding."""
    rng = np.random.default_rng(seed)
    dims = rng.integers(1, 4)
    sizes, reads = rng.integers(2, 6, dims), rng.integers(1, 4, dims)
    options = {
        "window_dimensions": reads.tolist(),
        "window_strides": rng.integers(1, 4, dims).tolist(),
        "padding": rng.integers(seed % 2 - 1, 4, (dims, 2)).tolist(),
        "base_dilation": rng.integers(1, 3, dims).tolist(),
        "window_dilation": rng.integers(1, 3, dims).tolist(),
    }
    if seed % 2:  # of others max and min have no gradient
        options = {name: option for name, option in options.items() if "dilation" not in name}
    return whole(rng, sizes), options


REDUCERS = {
    "sum": (0.0, lax.add),
    "max": (-np.inf, lax.max),
    "min": (np.inf, lax.min),
    "product": (1.0, lax.mul),
    "max, with 0": (0.0, lax.max),
    "min, with 1": (1.0, lax.min),
}
LINEAR = {"sum", "max", "min"}
