"""assert_matches_reference and assert_same_training: right code passes, wrong code fails in full words."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.interpreters.partial_eval import DynamicJaxprTracer
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.testing import assert_matches_reference, assert_same_training
from shardkit.testing._compare import constant_factor, distance, find_worst_gap, format_factor
from support.conformance import MODELS
from support.refusals import raises, refused, type_error, value_error
from support.training import lenient


def layer_norm(x_bd, gain_d):  # as a user writes it, in five lines
    mean = sk.all_reduce(x_bd.mean(1, keepdims=True), "model", op="mean")
    centered = x_bd - mean
    variance = sk.all_reduce((centered**2).mean(1, keepdims=True), "model", op="mean")
    return centered / jnp.sqrt(variance + 1e-5) * gain_d[None, :]


def whole_layer_norm(x, gain):
    centered = x - x.mean(1, keepdims=True)
    return centered / jnp.sqrt((centered**2).mean(1, keepdims=True) + 1e-5) * gain[None, :]


LAYOUT = {"in_specs": (P("data", "model"), P("model")), "out_specs": P("data", "model")}
SOFTMAX = MODELS[0]


def norm_args(dtype="float32"):
    rng = np.random.default_rng(0)
    return tuple(v.astype(dtype) for v in (rng.normal(3, 2, (4, 16)), rng.normal(size=16)))


# proves S43, F72: values and gradients of a sharded normalisation
def test_a_sharded_layer_norm_is_the_whole_one(mesh2x4):
    assert_matches_reference(layer_norm, whole_layer_norm, mesh=mesh2x4, args=norm_args(), eager=False, **LAYOUT)


# proves S43, F72: under jit and eagerly, values and gradients; and without `eager=` both ways are run
@pytest.mark.parametrize("what", ["the result", "the gradient of argument 0"])
@pytest.mark.parametrize("wrong", ["under jit", "eagerly"])
def test_a_kernel_that_is_wrong_in_one_way_to_run_it_alone(wrong, what):
    """A comparison that runs one way only, or one of the two only for values, passes one of these kernels."""

    def doubled(x, here):
        mode = "under jit" if isinstance(x, DynamicJaxprTracer) else "eagerly"
        return 2 * x if (mode, here) == (wrong, what) else x

    @jax.custom_vjp
    def kernel(x):
        return doubled(x, "the result")

    kernel.defvjp(lambda x: (x, None), lambda _, cotangent: (doubled(cotangent, "the gradient of argument 0"),))
    mesh, options = sk.make_mesh(jax.devices()[:2], data=2), {"in_specs": P("data"), "out_specs": P("data")}
    text = complaint(mesh, lambda x: kernel(x), lambda x: x, (np.ones(2, "f"),), **options)
    assert text.startswith(f"assert_matches_reference: on mesh data=2, {wrong}, {what} must equal the reference;")


# The tolerance is that of the reference's dtype, and a cotangent has that of the kernel's.
def test_a_kernel_in_another_dtype_than_the_reference():
    options = {"in_specs": P("data"), "out_specs": P("data"), "eager": False}
    options |= {"mesh": sk.make_mesh(jax.devices()[:2], data=2), "args": (np.arange(4, dtype="f") / 3,)}
    coarse = lambda x: (3.3 * x).astype(jnp.bfloat16)  # noqa: E731
    assert_matches_reference(lambda x: 3.3 * x, coarse, **options)
    with pytest.raises(AssertionError, match="the result must equal the reference"):
        assert_matches_reference(coarse, lambda x: 3.3 * x, **options)
    with pytest.raises(AssertionError, match="the gradient of argument 0 must equal the reference"):
        assert_matches_reference(lambda x: 2.1 * x + jax.lax.stop_gradient(1.2 * x), coarse, **options)


@pytest.mark.parametrize("summands", [0, -4])
def test_a_sum_of_no_terms_is_refused(summands, mesh2x4):  # the square root of -4 is nan, within which all is right
    with value_error(
        f"assert_matches_reference: summands must be a whole number of terms, 1 or more; got {summands!r}. Leave it "
        "out, or pass the length of the longest sum."
    ):
        assert_matches_reference(
            layer_norm, whole_layer_norm, mesh=mesh2x4, args=norm_args(), summands=summands, **LAYOUT
        )


def test_the_tolerance_follows_the_coarsest_dtype(mesh2x4):
    args = norm_args("bfloat16")
    whole = lambda x, gain: whole_layer_norm(x.astype(jnp.float32), gain.astype(jnp.float32))  # noqa: E731
    assert_matches_reference(
        lambda x, g: layer_norm(x, g).astype(jnp.float32), whole, mesh=mesh2x4, args=args, eager=False, **LAYOUT
    )


def complaint(mesh, kernel, reference, args, **options):
    return refused(lambda: assert_matches_reference(kernel, reference, mesh=mesh, args=args, **options), AssertionError)


def test_failures_in_full(data8):
    x = np.arange(8, dtype=np.float32)
    options = {"in_specs": P("data"), "out_specs": P()}
    assert complaint(
        data8, lambda x: 2 * sk.all_reduce(x, "data"), lambda x: x.sum(keepdims=True), (x,), **options
    ) == (
        "assert_matches_reference: on mesh data=8, under jit, the result must equal the reference; the largest "
        "difference is 28 at [0], where it is 56 and the reference 28 (everywhere 2x the reference); allowed is "
        "3.61e-05. Look for a missing or repeated reduction, or shards in the wrong order."
    )
    options = {"in_specs": P("data"), "out_specs": P("data")}
    assert complaint(data8, lambda x: sk.shift(x, "data", by=-1), lambda x: jnp.roll(x, 1), (x,), **options) == (
        "assert_matches_reference: on mesh data=8, under jit, the result must equal the reference; the largest "
        "difference is 6 at [0], where it is 1 and the reference 7; allowed is 9.04e-06. Look for a missing or "
        "repeated reduction, or shards in the wrong order."
    )
    stopped = lambda x: {"y": jax.lax.stop_gradient(x["v"]) * 2}  # noqa: E731
    assert complaint(data8, stopped, lambda x: {"y": x["v"] * 2}, ({"v": x},), **options) == (
        "assert_matches_reference: on mesh data=8, under jit, the gradient of argument 0.v must equal the reference; "
        "the largest difference is 5.19 at [0], where it is 0 and the reference -5.18677 (everywhere 0x the "
        "reference); allowed is 6.7e-06. Look for a missing or repeated reduction, or shards in the wrong order."
    )
    assert complaint(data8, lambda x: x[None], lambda x: x, (x,), **options) == (
        "assert_matches_reference: on mesh data=8, under jit, the result must have the reference's structure and "
        "shapes; (the whole tree) has shape (8, 1) and the reference (8,). Check out_specs and the gathers."
    )
    assert complaint(data8, lambda x: {"y": x}, lambda x: x, (x,), **options) == (
        "assert_matches_reference: on mesh data=8, under jit, the result must have the reference's structure and "
        "shapes; it is {'y': *} and the reference one array. Check out_specs and the gathers."
    )


def test_a_complex_result_has_a_complex_cotangent_and_both_parts_in_the_message():
    @jax.custom_vjp
    def total(z):
        return sk.all_reduce(z, "data")

    total.defvjp(lambda z: (total(z), None), lambda _, c: (sk.vary(jnp.conj(c), "data"),))
    z = (np.arange(2) + 1j).astype("complex64")
    mesh = sk.make_mesh(jax.devices()[:2], data=2)
    options = {"args": (z,), "in_specs": P("data"), "out_specs": P(), "eager": False}
    whole = lambda z: z.sum(keepdims=True)  # noqa: E731
    assert_matches_reference(lambda z: sk.all_reduce(z, "data"), whole, mesh=mesh, **options)
    assert "the gradient of argument 0 must equal the reference" in complaint(mesh, total, whole, **options)
    turned = complaint(mesh, lambda z: 1j * sk.all_reduce(z, "data"), whole, grad=False, **options)
    assert "the largest difference is 3.16 at [0], where it is -2+1j and the reference 1+2j; allowed is " in turned


def test_a_kernel_of_others_that_does_not_type_what_varies():
    """The carry of its loop begins equal on all devices, which check_vma refuses."""

    def foreign(x):
        return jax.lax.psum(jax.lax.fori_loop(0, 3, lambda i, c: c + x.sum(), jnp.float32(0)), "data")

    x, mesh = np.arange(4, dtype="f"), sk.make_mesh(jax.devices()[:2], data=2)
    options = {"mesh": mesh, "in_specs": P("data"), "out_specs": P(), "eager": False, "args": (x,)}
    with pytest.raises(TypeError, match="carry"):
        assert_matches_reference(foreign, lambda x: 3 * x.sum(), **options)
    assert_matches_reference(foreign, lambda x: 3 * x.sum(), check_vma=False, **options)
    emulated = sk.testing.emulate(foreign, {"data": 2}, P("data"), P(), check_vma=False)
    np.testing.assert_allclose(jax.grad(lambda x: emulated(x) ** 2)(x), 108.0)


def test_integers_and_nan_are_compared_exactly(data8):
    options = {"in_specs": P("data"), "out_specs": P("data"), "grad": False, "eager": False}
    big = np.full(8, 2**24, np.int32)
    assert "the largest difference is 1 at [0]" in complaint(data8, lambda x: x + 1, lambda x: x, (big,), **options)
    nan = np.float32([np.nan] * 8)
    assert_matches_reference(lambda x: x, lambda x: x, mesh=data8, args=(nan,), **options)
    ones = np.ones(8, np.float32)
    assert "the largest difference is inf at [0], where it is nan and the reference 1;" in complaint(
        data8, lambda x: x * jnp.nan, lambda x: x, (ones,), **options
    )


def test_keys_scalars_and_none_among_arguments_and_results():
    """A key has no values of its own to compare; a Python number no dtype."""
    options = {"mesh": sk.make_mesh(jax.devices()[:2], data=2), "eager": False, "out_specs": P()}
    folded = lambda tree, key: {"key": jax.random.fold_in(key, 1), "three": 3.0 + 0 * jnp.sum(tree["x"])}  # noqa: E731
    args = ({"x": np.ones(4, np.float32), "none": None}, jax.random.key(0))
    whole = lambda tree, key: {"key": jax.random.fold_in(key, 1), "three": 3.0}  # noqa: E731
    assert_matches_reference(folded, whole, in_specs=None, args=args, **options)
    other = lambda tree, key: {**whole(tree, key), "key": jax.random.fold_in(key, 2)}  # noqa: E731
    with pytest.raises(AssertionError, match="the result key must equal the reference; the largest difference is "):
        assert_matches_reference(folded, other, in_specs=None, args=args, **options)


def test_what_cannot_be_compared_is_said_in_full(data8):
    x, options = np.arange(8, dtype=np.float32), {"in_specs": P("data"), "out_specs": P("data"), "eager": False}
    assert complaint(data8, lambda x: x.astype(jnp.int32), lambda x: x, (x,), **options) == (
        "assert_matches_reference: on mesh data=8, under jit, the result must have a dtype of the reference's kind; "
        "(the whole tree) is int32 and the reference float32. Cast the kernel's or the reference's."
    )
    for message, (reference, args) in {
        "assert_matches_reference: the reference must be written in jax when gradients are compared; it converts "
        "its arguments to numpy arrays. Use jax.numpy in it, or pass grad=False.": (lambda x: np.asarray(x), (x,)),
        "assert_matches_reference: args must be a tuple of the arguments; got float32[8]. Pass args=(x,) for one "
        "argument.": (lambda x: x, x),
    }.items():
        with type_error(message):
            assert_matches_reference(lambda x: sk.vary(x, "data"), reference, mesh=data8, args=args, **options)


def test_what_is_allowed_is_rounding_and_neither_a_percent_nor_a_factor(data8):
    x = jnp.ones((8, 4096), jnp.bfloat16)
    options = {"in_specs": P("data"), "out_specs": P("data"), "grad": False, "eager": False}
    assert "1/2 of the reference" in complaint(data8, lambda x: x / 2, lambda x: x, (x,), **options)
    options = {"in_specs": P("data"), "out_specs": P("data"), "grad": False, "eager": False, "mesh": data8}
    args = (np.arange(1, 17, dtype=np.float32),)
    assert_matches_reference(lambda x: x * np.float32(1 + 2e-7), lambda x: x, args=args, **options)
    with pytest.raises(AssertionError, match="the largest difference"):
        assert_matches_reference(lambda x: x * np.float32(1 + 1e-4), lambda x: x, args=args, **options)


def test_words_for_factors_and_integers_must_be_equal_whatever_is_allowed():
    y = np.array([1.0, -2, 0])
    assert constant_factor(3 * y, y) == 3
    assert constant_factor(y, y) is None and constant_factor(y + 1, y) is None and constant_factor(y, 0 * y) is None
    assert [format_factor(f) for f in (4, 0.25, -1, 0, 1.5, -0.5)] == [
        *("4x", "1/4 of", "-1x", "0x", "1.5x", "-1/2 of")
    ]
    assert distance(np.array([np.nan, np.inf, 1]), np.array([np.nan, np.inf, np.nan])).tolist() == [0, 0, np.inf]
    floats, integers = {"x": np.array([1000.0, 2.0])}, {"n": np.array([1000, 2])}
    assert find_worst_gap({"x": floats["x"] + 1}, floats, lambda *_: 2.0) is None
    found = find_worst_gap({"n": integers["n"] + 1}, integers, lambda *_: 2.0)
    assert found is not None and (found.path, found.largest, found.allowed) == ("n", 1, 0)


def test_training_compares_the_copies_too(data8, monkeypatch):
    def differ(program, reference):
        raise AssertionError("the copies differ")

    monkeypatch.setattr(sys.modules[assert_same_training.__module__], "equal_copies", differ)
    with raises(AssertionError, "assert_same_training: on mesh data=8 with plan dp('data'), the copies differ"):
        training(mesh=data8)


def training(grad_fn=None, reference=None, plan=None, mesh=None, optimizer=None, steps=3, **options):
    own = sk.value_and_grad(SOFTMAX.loss(None))
    assert_same_training(
        grad_fn or own,
        reference or own,
        optimizer or optax.sgd(0.5),
        mesh=mesh,
        plan=plan or sk.dp("data"),
        params=SOFTMAX.params(),
        batches=[SOFTMAX.batch(i) for i in range(steps)],
        **options,
    )


# proves F72: unequal weights, dropout, a leaf whose gradient is zero, clipping and Adam
@pytest.mark.quick("2")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_on_a_mesh_is_training_on_one_device(data8, accumulate):
    adam = lenient(optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3)))
    training(mesh=data8, optimizer=adam, accumulate=accumulate)


def test_sharded_layouts_and_another_key():
    mesh = sk.make_mesh(jax.devices()[:4], fsdp=4)
    training(mesh=mesh, plan=sk.fsdp("fsdp", min_size=1), key=jax.random.key(5), steps=1)


def test_training_failures_in_full(data8):
    own = sk.value_and_grad(SOFTMAX.loss(None))

    def doubled(params, batch, keys, *, scale=1):
        loss, aux, grads = own(params, batch, keys, scale=scale)
        return loss, aux, {**grads, "bias": 2 * grads["bias"]}

    clipped = optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(1.0))
    text = refused(lambda: training(doubled, mesh=data8, optimizer=clipped), AssertionError)
    assert text.startswith(
        "assert_same_training: on mesh data=8 with plan dp('data'), step 0: the gradient of bias must equal one "
        "device's; the largest difference is 0."
    )
    assert "(everywhere 2x one device's); allowed is " in text
    assert text.endswith(
        ". Check the sums in the loss and the axes over which it varies, and that random numbers come from `keys`. The "
        "loss is one device's, so the gradient alone may mix a device's examples, as where a GradFn clips by them, or "
        "the backward pass of a custom_vjp; clip in the optimizer, by optax.clip_by_global_norm."
    )
    with value_error("assert_same_training: at least one batch is needed; got none. Pass one for each step."):
        training(mesh=data8, steps=0)
