"""Convolutions and pooling in a proof: against jax for drawn parameters, and proofs of sharded ones."""

import re
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.testing import Row, assert_equal_for_all_inputs
from shardkit.testing.exact.interpreter import Interpreter
from shardkit.testing.exact.law import equal_for_all_inputs
from shardkit.testing.exact.numbers.field import Field, Settings
from shardkit.testing.exact.numbers.orders import find_equal
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.one_device import Reference, Training
from shardkit.testing.program import Program

SEEDS = range(100)
FEW = [str(seed) for seed in range(12)]


def whole(rng, shape):
    """Small whole numbers, many of them equal."""
    return rng.integers(-3, 4, shape).astype(np.float32)


def means_what_jax_computes(function, *args):
    """The numbers are jax's integers modulo primes, the real values are its floats, and no sign is wrong."""
    field = Field(Settings(2, 3))
    found = Interpreter(field).run(jax.make_jaxpr(function)(*args), [field.lift(x) for x in args])
    for x, wanted in zip(found, jax.tree.leaves(jax.jit(function)(*args)), strict=True):
        wanted = np.asarray(wanted)
        x = x if isinstance(x, Exact) else field.lift(x)
        assert x.shape == wanted.shape
        assert find_equal(field, x, field.lift(wanted)).all()
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
    padding = rng.integers(-1, 4, (dims, 2))
    padding[:, 1] = np.maximum(padding[:, 1], -padding[:, 0])  # jax takes no array of less than nothing
    orders = [tuple(int(dim) for dim in rng.permutation(dims + 2)) for _ in range(3)]
    options = {
        "window_strides": rng.integers(1, 4, dims).tolist(),
        "padding": padding.tolist(),
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


def pool(init, by, options, x):
    return lax.reduce_window(x, init, by, **options)


REDUCERS = {
    "sum": (0.0, lax.add),
    "max": (-np.inf, lax.max),
    "min": (np.inf, lax.min),
    "a sum and 2": (2.0, lax.add),
    "product": (1.0, lax.mul),
    "max, at least 0": (0.0, lax.max),
    "min, at most 1": (1.0, lax.min),
}


# proves N49: a gradient goes to the first of equal elements, and to none of the padding
@pytest.mark.quick(*FEW)
@pytest.mark.parametrize("seed", SEEDS)
def test_pooling_means_what_jax_computes(seed):
    rng = np.random.default_rng(seed)
    x, options = drawn_windows(seed)
    pools = {name: partial(pool, init, by, options) for name, (init, by) in REDUCERS.items()}
    smooth = ("sum", "max", "min") if seed % 2 else ("sum",)
    cotangents, tangents = whole(rng, jax.eval_shape(pools["sum"], x).shape), whole(rng, x.shape)
    distinct = rng.permutation(x.size).astype(np.float32).reshape(x.shape)  # else compilers differ in the tangent

    def every(x, distinct, cotangents, tangents):
        values = [each(x) for each in pools.values()]
        backward = [jax.vjp(pools[name], x)[1](cotangents) for name in smooth]
        return values, backward, [jax.jvp(pools[name], (distinct,), (tangents,)) for name in smooth]

    means_what_jax_computes(every, x, distinct, cotangents, tangents)


def test_a_gradient_of_pooling_whose_cotangents_or_array_is_known():
    x = whole(np.random.default_rng(0), (5, 6))
    largest = partial(
        pool, -np.inf, lax.max, {"window_dimensions": (2, 3), "window_strides": (2, 1), "padding": "SAME"}
    )
    ones = np.ones(jax.eval_shape(largest, x).shape, np.float32)
    means_what_jax_computes(lambda x: jax.vjp(largest, x)[1](ones), x)
    means_what_jax_computes(lambda ones: jax.vjp(largest, x)[1](ones), ones)
    distinct = np.random.default_rng(0).permutation(x.size).astype(np.float32).reshape(x.shape)
    means_what_jax_computes(lambda t: jax.jvp(largest, (distinct,), (t,)), x)


@pytest.mark.usefixtures("silent_floats")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_spreads_as_in_jax(value):
    def every(x, kernel):
        x = jnp.where((np.arange(6) == 3)[None, None], value, x)
        results = [lax.conv(x, kernel, (1,), "SAME"), lax.conv_general_dilated(x, kernel, (1,), [(1, 0)], (2,))]
        options = {"window_dimensions": (1, 1, 3), "window_strides": (1, 1, 2), "padding": "SAME"}
        return [*results, *[pool(init, by, options, x) for init, by in REDUCERS.values()]]

    args = np.arange(1, 7, dtype=np.float32)[None, None], np.array([[[1, 0, -3]]], np.float32)
    field = Field(Settings(2, 3))
    found = Interpreter(field).run(jax.make_jaxpr(every)(*args), [field.lift(x) for x in args])
    for x, wanted in zip(found, jax.jit(every)(*args), strict=True):
        assert find_equal(field, x, field.lift(np.asarray(wanted))).all()


@pytest.mark.parametrize("reverse", [False, True])
def test_logarithms_of_sums_of_exps(reverse):
    def sums(x):
        return jnp.exp(lax.cumlogsumexp(jnp.log(x), 1, reverse=reverse))

    field, x = Field(Settings(2, 3)), np.arange(12, dtype=np.float32).reshape(3, 4) % 5 + 1
    [found] = Interpreter(field).run(jax.make_jaxpr(sums)(x), [field.lift(x)])
    assert find_equal(field, found, field.lift(np.asarray(lax.cumsum(x, 1, reverse=reverse)))).all()
    np.testing.assert_allclose(found.real[0], sums(x), 1e-5)


# Proofs


class Case(NamedTuple):
    """A kernel on a mesh, and the same without one."""

    kernel: Any
    reference: Any
    ins: Any
    outs: Any
    shapes: Any
    sizes: Any = {"a": 2}  # noqa: RUF012 (a constant)

    def proved(self, **options):
        args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in self.shapes]
        return assert_equal_for_all_inputs(
            self.kernel,
            self.reference,
            mesh=sk.abstract_mesh(**self.sizes),
            in_specs=self.ins,
            out_specs=self.outs,
            args=args,
            **options,
        )


def with_halo(x, axis, dim, before=1, behind=1, flip=False):
    """x with the last rows of the device before, and the first of the next one; zeros at the ends."""
    n, size = lax.axis_size(axis), x.shape[dim]
    up, down = [(i, i + 1) for i in range(n - 1)], [(i + 1, i) for i in range(n - 1)]
    if flip:
        up, down = down, up
    last, first = lax.slice_in_dim(x, size - before, size, axis=dim), lax.slice_in_dim(x, 0, behind, axis=dim)
    return jnp.concatenate([lax.ppermute(last, axis, up), x, lax.ppermute(first, axis, down)], dim)


def causal(x, w, left):
    """A causal depthwise convolution of [batch, time, channels], as Mamba has it."""
    numbers = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(x, w, (1,), [(left, 0)], dimension_numbers=numbers, feature_group_count=x.shape[-1])


def conv(x, w, padding="SAME", strides=(1, 1), **options):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=numbers, **options)


def depthwise(x, w):
    return conv(x, w, feature_group_count=x.shape[-1])


def strided(x, w, above):
    return conv(x, w, [above, (2, 2)], (2, 2), rhs_dilation=(2, 2))


def windows(x, init, by, above):
    """Pooling of 3 by 3 with stride 2."""
    return lax.reduce_window(x, init, by, (1, 3, 3, 1), (1, 2, 2, 1), [(0, 0), above, (1, 0), (0, 0)])


def largest(x, above=(1, 0)):
    return windows(x, -jnp.inf, lax.max, above)


def mean(x, above=(1, 0)):
    return windows(x, 0.0, lax.add, above) / 9


def largest_with_halo(x, border):
    x = with_halo(x, "a", 1, 1, 0)
    outside = (jnp.arange(x.shape[1]) == 0) & (lax.axis_index("a") == 0)
    return largest(jnp.where(outside[None, :, None, None], border, x), (0, 0))


def quarters(x):
    """The largest of 2 by 2, without windows."""
    return x.reshape(len(x), x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1).max((2, 4))


def largest_of_quarters(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


INSIDE = [(0, 0), (1, 1)]  # no padding where a halo is
ROWS, CHANNELS = P(None, "a"), P(None, None, None, "a")
IMAGES, KERNEL = (1, 8, 8, 2), (3, 3, 2, 2)
SPLIT_ROWS = ((ROWS, P()), ROWS, (IMAGES, KERNEL))
SPLIT_INPUTS = ((CHANNELS, P(None, None, "a")), P(), (IMAGES, KERNEL))
POOLED = (ROWS, ROWS, (IMAGES,))
SEQUENCES = ((ROWS, P()), ROWS, ((2, 16, 3), (4, 1, 3)))
FOUR, TWO = {"a": 4}, {"a": 2, "b": 2}

RIGHT = {
    "rows split, in 1-D": Case(
        lambda x, w: jax.nn.silu(causal(with_halo(x, "a", 1, 3, 0), w, 0)),
        lambda x, w: jax.nn.silu(causal(x, w, 3)),
        *SEQUENCES,
        FOUR,
    ),
    "rows split": Case(lambda x, w: conv(with_halo(x, "a", 1), w, INSIDE), conv, *SPLIT_ROWS, FOUR),
    "rows and columns split": Case(
        lambda x, w: conv(with_halo(with_halo(x, "a", 1), "b", 2), w, "VALID"),
        conv,
        (P(None, "a", "b"), P()),
        P(None, "a", "b"),
        (IMAGES, KERNEL),
        TWO,
    ),
    "strided and dilated": Case(
        lambda x, w: strided(with_halo(x, "a", 1, 2, 1), w, (0, 0)), lambda x, w: strided(x, w, (2, 1)), *SPLIT_ROWS
    ),
    "input channels split": Case(lambda x, w: lax.psum(conv(x, w), "a"), conv, *SPLIT_INPUTS),
    "output channels split": Case(conv, conv, (P(), CHANNELS), CHANNELS, (IMAGES, KERNEL)),
    "depthwise, channels split": Case(depthwise, depthwise, (CHANNELS, CHANNELS), CHANNELS, (IMAGES, (3, 3, 1, 2))),
    "a causal convolution as shifted sums": Case(
        lambda x, w: causal(x, w, 3),
        lambda x, w: sum(jnp.pad(x, ((0, 0), (3, 0), (0, 0)))[:, i : i + 16] * w[i][None] for i in range(4)),
        (P("a"), P()),
        P("a"),
        ((2, 16, 3), (4, 1, 3)),
    ),
    "max pool": Case(lambda x: largest_with_halo(x, -jnp.inf), largest, *POOLED),
    "mean pool": Case(lambda x: mean(with_halo(x, "a", 1, 1, 0), (0, 0)), mean, *POOLED),
    "max pool by a reshape": Case(largest_of_quarters, quarters, *POOLED),
    "min pool": Case(
        lambda x: -largest(-x), lambda x: windows(x, jnp.inf, lax.min, (1, 0)), CHANNELS, CHANNELS, (IMAGES,)
    ),
}
UNEQUAL = "the result is not the reference's for all inputs"
WRONG = {
    "halo from the other side": (
        Case(lambda x, w: conv(with_halo(x, "a", 1, flip=True), w, INSIDE), conv, *SPLIT_ROWS, FOUR),
        "with ppermute the other way round, it is right",
    ),
    "halo of one too few": (
        Case(
            lambda x, w: causal(with_halo(x, "a", 1, 2, 0), w, 1), lambda x, w: causal(x, w, 3), *SEQUENCES, FOUR
        ),
        f"{UNEQUAL}, only where 'a' is 1 to 3.",
    ),
    "zeros between devices": (
        Case(conv, conv, *SPLIT_ROWS),
        f"{UNEQUAL}. The first value that the reference does not have is that of conv_general_dilated at",
    ),
    "kernel turned round": (
        Case(lambda x, w: conv(with_halo(x, "a", 1), w[::-1], INSIDE), conv, *SPLIT_ROWS),
        "without rev, it is right",
    ),
    "mean over input channels": (
        Case(lambda x, w: lax.pmean(conv(x, w), "a"), conv, *SPLIT_INPUTS),
        f"{UNEQUAL}: it is 1/2 of the reference everywhere",
    ),
    "function before the sum over input channels": (
        Case(lambda x, w: lax.pmean(jnp.sin(conv(x, w)), "a"), lambda x, w: jnp.sin(conv(x, w)), *SPLIT_INPUTS),
        "with the sum of conv_general_dilated over 'a', it is right",
    ),
    "zeros around a max pool": (
        Case(lambda x: largest_with_halo(x, 0.0), largest, *POOLED),
        f"{UNEQUAL}, only",
    ),
    "no halo of a max pool": (Case(largest, largest, *POOLED), f"{UNEQUAL}, only where 'a' is 1"),
}  # fmt: skip


# proves N49
@pytest.mark.parametrize("name", RIGHT)
def test_a_sharded_convolution_or_pooling_is_proved(name):
    found = RIGHT[name].proved()
    assert found.chance < 1e-12 and not found.uninterpreted


# proves N49
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_one_is_refuted(name):
    case, message = WRONG[name]
    with pytest.raises(AssertionError, match=re.escape(message)):
        case.proved()


def test_which_window_an_element_is_the_largest_of_is_a_comparison():
    """It goes both ways in the draws, and the certificate says so."""
    found = RIGHT["max pool"].proved()
    assert any("comparisons: at 1 line, both ways" in line for line in found.compared), found.compared


@pytest.mark.parametrize(
    ("init", "by", "said"),
    [
        (0.0, lambda x, y: x + 2 * y, "reduce_window by another function"),
        (0.0, lambda x, y: x + x, "reduce_window by another function"),
        (0.0, lambda x, y: x * 2.0, "reduce_window by another function"),
        (0.0, lambda x, y: y, "reduce_window by another function"),
        (0.0, lax.sub, "reduce_window by sub"),
    ],
)
def test_windows_reduced_by_another_function_are_refused(init, by, said):
    kernel = lambda x: lax.reduce_window(x, init, by, (2,), (1,), "SAME")  # noqa: E731
    with pytest.raises(ValueError, match=said):
        Case(kernel, kernel, P(), P(), ((4,),)).proved(grad=False)


def test_a_convolution_that_is_too_large_is_refused_at_once():
    case = Case(conv, conv, (P("a"), P()), P("a"), ((64, 64, 64, 64), (3, 3, 64, 64)))
    with pytest.raises(ValueError, match=r"shapes must be small.*the largest array is \[64, 64, 64, 64\]"):
        case.proved()


# Steps


def network(params, x):
    x = jax.nn.relu(conv(x, params["conv"]) + params["bias"][None, None, None])
    return largest_of_quarters(x).reshape(len(x), -1) @ params["dense"]


def cross_entropy(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)[:, 0]


def loss_fn(params, batch, keys):
    return sk.Mean.of(cross_entropy(network(params, batch["x"]), batch["y"]))


def centred(params, batch, keys):
    """Wrong where the batch is split: the mean is that of a device's examples."""
    x = conv(batch["x"], params["conv"])
    return sk.Mean.of((x - x.mean(0, keepdims=True)) ** 2)


PARAMS = {"conv": np.ones((3, 3, 1, 2), "f"), "bias": np.ones(2, "f"), "dense": np.ones((2 * 2 * 2, 3), "f")}
BATCHES = [{"x": np.ones((4, 4, 4, 1), "f"), "y": np.arange(4) % 3}] * 2


# proves N49
@pytest.mark.parametrize(
    ("row", "loss", "wrong"),
    [
        (Row({"data": 2}, sk.dp("data")), loss_fn, None),
        (Row({"fsdp": 4}, sk.fsdp("fsdp", min_size=1)), loss_fn, None),
        (Row({"data": 2}, sk.dp("data")), centred, "the loss of step 0 is not the reference's for all inputs"),
    ],
    ids=["dp", "fsdp", "a mean of a device's examples"],
)
def test_a_training_step_of_a_convolutional_network(row, loss, wrong):
    grad_fn, optimizer, key = sk.value_and_grad(loss), optax.sgd(0.1), jax.random.key(0)
    program = Program.of(row, grad_fn, optimizer, PARAMS, BATCHES, key)
    reference = Reference((), Training(grad_fn, optimizer, PARAMS, tuple(BATCHES), key))
    if wrong is None:
        assert equal_for_all_inputs(program, reference) is None
    else:
        with pytest.raises(AssertionError, match=wrong):
            equal_for_all_inputs(program, reference)


# Modules of other libraries


def linen_modules():
    nn = pytest.importorskip("flax.linen", reason="flax is not installed; pip install 'shardkit[test]' installs it")

    class Block(nn.Module):
        """Of a residual network, with group norm."""

        @nn.compact
        def __call__(self, x):
            y = nn.relu(nn.GroupNorm(2)(nn.Conv(4, (3, 3), (2, 2), use_bias=False)(x)))
            y = nn.GroupNorm(2)(nn.Conv(4, (3, 3), use_bias=False)(y))
            y = nn.relu(y + nn.Conv(4, (1, 1), (2, 2))(x))
            return nn.avg_pool(nn.max_pool(y, (3, 3), (1, 1), "SAME"), (2, 2), (1, 1), "SAME", count_include_pad=False)

    return {
        "block": (Block(), (2, 6, 6, 2)),
        "transposed": (nn.ConvTranspose(3, (3, 3), (2, 2)), (2, 4, 4, 2)),
        "circular": (nn.Conv(4, (3,), padding="CIRCULAR", feature_group_count=2), (2, 5, 2)),
        "local": (nn.ConvLocal(3, (3,), kernel_dilation=2), (2, 7, 2)),
    }


# proves N49
@pytest.mark.quick("block")
@pytest.mark.parametrize("name", ["block", "transposed", "circular", "local"])
@pytest.mark.usefixtures("any_promotion")
def test_a_module_of_flax_over_a_split_batch(name):
    module, shape = linen_modules()[name]
    x = jax.ShapeDtypeStruct(shape, np.float32)
    params = jax.eval_shape(module.init, jax.random.key(0), x)
    assert_equal_for_all_inputs(
        module.apply,
        module.apply,
        mesh=sk.abstract_mesh(data=2),
        in_specs=(P(), P("data")),
        out_specs=P("data"),
        args=(params, x),
    )


# proves N49
@pytest.mark.parametrize("name", ["conv", "transposed", "pools"])
@pytest.mark.usefixtures("any_promotion")
def test_a_module_of_equinox_over_a_split_batch(name):
    eqx = pytest.importorskip("equinox", reason="equinox is not installed; pip install 'shardkit[test]' installs it")
    key = jax.random.key(0)
    modules = {
        "conv": lambda: eqx.nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2, key=key),
        "transposed": lambda: eqx.nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1, key=key),
        "pools": lambda: eqx.nn.Sequential(
            [eqx.nn.MaxPool2d(3, 2, padding=1, use_ceil=True), eqx.nn.AdaptiveAvgPool2d((2, 1))]
        ),
    }
    arrays, static = eqx.partition(modules[name](), eqx.is_inexact_array)
    apply = lambda arrays, x: jax.vmap(eqx.combine(arrays, static))(x)  # noqa: E731
    assert_equal_for_all_inputs(
        apply,
        apply,
        mesh=sk.abstract_mesh(data=2),
        in_specs=(P(), P("data")),
        out_specs=P("data"),
        args=(arrays, jax.ShapeDtypeStruct((2, 2, 6, 6), np.float32)),
    )
