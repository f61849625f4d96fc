"""Attention by the kernel for TPUs that jax ships: its numbers in an interpreter, its program by the TPU's compiler."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit._jax import backends
from shardkit._jax.pallas import interpreting
from shardkit.layers import dot_attention, ring_attention, ulysses_attention, zigzag
from shardkit.models import transformer
from support.compilers import tpu
from support.refusals import refused

N = 2
TOKENS = 512  # in zigzag order a tile has a quarter of them
SPLIT = P(None, "c")


def draw(dtype, packed):
    """Queries, keys and values; two query heads share a key head; three documents."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(1, TOKENS, heads, 8)), dtype) for heads in (2, 1, 1)]
    documents = np.sort(rng.integers(0, 3, (1, TOKENS)), axis=1).astype(np.int32)
    return [*arrays, jnp.asarray(documents) if packed else None]


def differentiate(attend, q, k, v, documents):
    """The result and the gradients of queries, keys and values."""
    y, backward = jax.vjp(lambda q, k, v: attend(q, k, v, segments_bt=documents), q, k, v)
    return y, *backward(jnp.cos(y))


def run_on_mesh(attend, arrays, order):
    """The same on a mesh, with the tokens split; the interpreter of Pallas has no varying types."""
    mesh = sk.make_mesh(jax.devices()[:N], c=N)

    def kernel(arrays):
        if order != "zigzag":
            return differentiate(attend, *arrays)
        return zigzag(differentiate(attend, *zigzag(arrays, "c")), "c", inverse=True)

    return jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=False))(arrays)


# By name: the form, causal, documents, dtype, the order of the tokens.
FORMS = {
    "one device": (dot_attention, True, True, "float32", None),
    "zigzag ring": (partial(ring_attention, axis="c", order="zigzag"), True, True, "float32", "zigzag"),
    "ring of all": (partial(ring_attention, axis="c"), False, False, "float32", "contiguous"),
    "causal ring, bf16": (partial(ring_attention, axis="c"), True, False, "bfloat16", "contiguous"),
    "ulysses": (partial(ulysses_attention, axis="c"), True, True, "float32", "contiguous"),
}


# What the kernel's interpreter alone tells: how tiles are joined, and what a tile's backward pass is given.
@pytest.mark.quick("one device", "zigzag ring", "causal ring, bf16")
@pytest.mark.parametrize("name", FORMS)
def test_the_kernel_computes_what_attention_is(name):
    attend, causal, packed, dtype, order = FORMS[name]
    arrays = draw(dtype, packed)
    expected = differentiate(partial(dot_attention, causal=causal), *arrays)
    with interpreting():
        by_kernel = partial(attend, causal=causal, kernel=True)
        got = differentiate(by_kernel, *arrays) if order is None else run_on_mesh(by_kernel, arrays, order)
    tolerance = 1e-4 if dtype == "float32" else 0.1
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(np.asarray(x, "f"), np.asarray(y, "f"), rtol=tolerance, atol=tolerance)


def test_on_a_cpu_the_same_program_runs_as_without_the_kernel():
    arrays = draw("float32", True)
    programs = []
    for kernel in (False, True):
        attend = partial(dot_attention, kernel=kernel)
        programs.append(jax.jit(partial(differentiate, attend)).lower(*arrays).as_text())
    assert programs[0] == programs[1]


def test_what_the_kernel_does_not_compute():
    q, k, v, _ = draw("float32", False)
    positions = jnp.arange(TOKENS)[None]
    assert "got positions and kernel=True" in refused(
        lambda: dot_attention(q, k, v, positions_bt=positions, kernel=True)
    )
    short = [x[:, :100] for x in (q, k, v)]
    assert "must be a multiple of 128 for the kernel; got 100" in refused(lambda: dot_attention(*short, kernel=True))
    with backends.tracing_for("gpu", "NVIDIA H100 80GB HBM3"):
        assert "must run on TPUs; got kernel=True for GPUs" in refused(lambda: dot_attention(q, k, v, kernel=True))
    mesh = sk.make_mesh(jax.devices()[:N], c=N)
    ring = partial(ring_attention, axis="c", order="zigzag", kernel=True)
    for options, message in (({"block": 64}, "got block=64 and kernel=True"), ({}, "got 192")):
        attend = partial(ring, **options)
        mapped = jax.shard_map(attend, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT)
        tokens = TOKENS if options else 3 * 256
        arrays = [jnp.zeros((1, tokens, heads, 8)) for heads in (2, 1, 1)]
        assert message in refused(lambda mapped=mapped, arrays=arrays: mapped(*arrays))


# What the TPU's compiler alone tells: that types of varying axes are accepted, what is held, sent and counted.
@tpu
def test_the_program_of_a_tpu_holds_no_scores():
    shapes = [jax.ShapeDtypeStruct((1, 16_384, heads, 128), jnp.bfloat16) for heads in (2, 1, 1)]
    mesh = sk.abstract_mesh(c=4)
    attend = partial(ring_attention, axis="c", order="zigzag", kernel=True)
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT)
    step = jax.jit(partial(differentiate, lambda q, k, v, segments_bt: mapped(q, k, v)))
    report = sk.aot.compile(step, (*shapes, None), topology="v5e:2x2")
    # The scores of one tile are 32 MiB.
    assert report.memory.temp < 2 * 2048 * 2048 * 4
    assert report.compute.kernels == 0
    # Traced for no chip, attention writes its scores; it sends the same bytes.
    with backends.tracing_for("tpu", "TPU v5 lite"):
        by_kernel = sk.census(step, *shapes, None)
    assert by_kernel.sent() == sk.census(step, *shapes, None).sent() == 28 * 2**20
    # Of nine tiles of 2,048 tokens two are causal, of which the kernel computes ten of sixteen blocks. There are two
    # matmuls forward, and three and four backward, since two kernels compute the scores and the gradients of weights.
    visited = 7 + 2 * 10 / 16
    assert report.compute.flops == 9 * visited * 2 * 2 * 2048 * 2048 * 128


# The types, the promotion of dtypes and the first checks of a whole step.
@tpu
@pytest.mark.deep
def test_a_step_with_the_kernel_is_compiled():
    config = transformer.Config(vocabulary=128, layers=1, dim=256, heads=4, kv_heads=2, hidden=256)
    mesh = sk.abstract_mesh(data=2, context=2)
    plan = sk.chain(sk.dp("data"), sk.cp("context"))
    params = jax.eval_shape(lambda: transformer.init(jax.random.key(0), config))
    tokens = jax.ShapeDtypeStruct((2, 1024), jnp.int32)
    grad_fn = sk.value_and_grad(transformer.loss_fn(config, transformer.Axes(context="context", kernel=True)))
    init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=plan, precision="bf16")
    report = sk.aot.compile(step, (init.abstract(params), {"tokens": tokens, "targets": tokens}), topology="v5e:2x2")
    assert report.fits and report.compute.kernels == 0
