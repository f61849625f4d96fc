"""Attention by the kernels that jax ships: their numbers in an interpreter, their programs by the chips' compilers."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit._jax import backends
from shardkit._jax.pallas import cost_scope, find_cost, interpreting, writing_kernels_out
from shardkit.layers import dot_attention, ring_attention, ulysses_attention, zigzag
from shardkit.layers.attention_kernel import count_costs
from shardkit.layers.attention_kernel_gpu import choose_blocks
from shardkit.layers.attention_kernel_tpu import choose_block
from shardkit.layers.tiles import TileSizes, count_tiles
from shardkit.models import transformer
from support.compilers import gpu, tpu
from support.refusals import refused

# jax 0.12 says at the lowering of a kernel of Triton that its backend will be removed.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

N = 2
SPLIT = P(None, "c")


def draw(tokens, dtype="float32", packed=False):
    """Two sequences; two query heads share each of two key heads; three documents, others in each sequence."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(2, tokens, heads, 16)), dtype) for heads in (4, 2, 2)]
    documents = np.sort(rng.integers(0, 3, (2, tokens)), axis=1).astype(np.int8)
    return [*arrays, jnp.asarray(documents) if packed else None]


def differentiate(attend, q, k, v, documents):
    """The result and the gradients of queries, keys and values."""
    y, backward = jax.vjp(lambda q, k, v: attend(q, k, v, segments_bt=documents), q, k, v)
    return y, *backward(jnp.cos(y))


def run_on_mesh(attend, arrays, order, devices):
    """The same on a mesh, with the tokens split; the interpreter of Pallas has no varying types."""
    mesh = sk.make_mesh(jax.devices()[:devices], c=devices)

    def kernel(arrays):
        if order != "zigzag":
            return differentiate(attend, *arrays)
        return zigzag(differentiate(attend, *zigzag(arrays, "c")), "c", inverse=True)

    return jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=False))(arrays)


def checkpointed(q, k, v, **options):
    """Attention that is computed once more for its gradient."""
    return jax.checkpoint(partial(dot_attention, **options))(q, k, v)


class Row(NamedTuple):
    """A form of attention, its options, and what it is called with."""

    attend: Callable[..., Any]
    options: dict[str, Any]
    tokens: int
    packed: bool = False  # whether there are documents
    dtype: str = "float32"
    order: str = ""  # of the tokens on a mesh; "": on one device
    devices: int = N


# A tile of 640 tokens has five blocks of 128 for TPUs, and for GPUs five or ten; one of 384 has three of 128. A tile of
# 512 is one block for TPUs.
ROWS = {
    "tpu, one device": Row(dot_attention, {"causal": True}, 640, packed=True),
    "tpu, one device, all keys": Row(checkpointed, {"causal": False, "scale": 0.5}, 640, packed=True),
    "tpu, zigzag ring": Row(ring_attention, {"axis": "c", "order": "zigzag"}, 1536, packed=True, order="zigzag"),
    "tpu, ring of all": Row(ring_attention, {"axis": "c", "causal": False}, 768, order="contiguous"),
    "tpu, causal ring, bf16": Row(ring_attention, {"axis": "c"}, 512, dtype="bfloat16", order="contiguous"),
    "tpu, ulysses": Row(ulysses_attention, {"axis": "c"}, 384, packed=True, order="contiguous"),
    "gpu, one device": Row(dot_attention, {"causal": True}, 640, packed=True),
    "gpu, one device, all keys": Row(checkpointed, {"causal": False, "scale": 0.5}, 640, packed=True),
    "gpu, one device, bf16": Row(dot_attention, {"causal": True}, 384, dtype="bfloat16"),
    "gpu, zigzag ring": Row(ring_attention, {"axis": "c", "order": "zigzag"}, 1024, order="zigzag", devices=4),
    "gpu, zigzag on one device": Row(ring_attention, {"axis": "c", "order": "zigzag"}, 256, order="zigzag", devices=1),
    "gpu, ring of all": Row(ring_attention, {"axis": "c", "causal": False}, 768, order="contiguous"),
    "gpu, causal ring, bf16": Row(ring_attention, {"axis": "c"}, 512, dtype="bfloat16", order="contiguous"),
    "gpu, ulysses": Row(ulysses_attention, {"axis": "c"}, 384, packed=True, order="contiguous"),
}


# What the kernel's interpreter alone tells: how blocks and tiles are joined, and what a backward pass is given.
@pytest.mark.quick(
    "tpu, one device", "tpu, zigzag ring", "tpu, causal ring, bf16", "gpu, one device", "gpu, zigzag ring"
)
@pytest.mark.parametrize("name", ROWS)
def test_the_kernel_computes_what_attention_is(name):
    row = ROWS[name]
    arrays = draw(row.tokens, row.dtype, row.packed)
    alike = {option: value for option, value in row.options.items() if option in ("causal", "scale")}
    expected = differentiate(partial(dot_attention, **alike), *arrays)
    platform, _, _ = name.partition(",")
    by_kernel = partial(row.attend, **row.options, kernel=True)
    with interpreting(platform):
        if row.order:
            got = run_on_mesh(by_kernel, arrays, row.order, row.devices)
        else:
            got = differentiate(by_kernel, *arrays)
    tolerance = 1e-4 if row.dtype == "float32" else 0.03
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(np.asarray(x, "f"), np.asarray(y, "f"), rtol=tolerance, atol=tolerance)


def test_on_a_cpu_the_same_program_runs_as_without_the_kernel():
    arrays = draw(128, packed=True)
    programs = []
    for kernel in (False, True):
        attend = partial(dot_attention, kernel=kernel)
        programs.append(jax.jit(partial(differentiate, attend)).lower(*arrays).as_text())
    assert programs[0] == programs[1]
    # A proof on a TPU's host reads the same form.
    with backends.tracing_for("tpu", "TPU v5 lite"):
        by_kernel = jax.make_jaxpr(partial(dot_attention, kernel=True))(*arrays[:3])
        with writing_kernels_out():
            written_out = jax.make_jaxpr(partial(dot_attention, kernel=True))(*arrays[:3])
    assert "pallas_call" in str(by_kernel) and "pallas_call" not in str(written_out)


def test_blocks_and_what_they_cost_on_tpus():
    assert [choose_block(tokens, 128, 2) for tokens in (128, 640, 768, 2048)] == [128, 128, 256, 512]
    assert choose_block(2048, 256, 4) == 256  # 512 rows of 1 KiB are half a MiB
    sizes = TileSizes(heads=16, key_heads=4, tokens=2048, head=128, itemsize=2)
    forward, of_keys, of_queries = count_costs("tpu", sizes, causal=True)
    assert forward.exps == 16 * 10 * 512**2  # ten of sixteen blocks
    assert [cost.flops for cost in (forward, of_keys, of_queries)] == [
        matmuls * 256 * forward.exps for matmuls in (2, 4, 3)
    ]
    assert count_tiles(1) == (1, 1, 0)  # parts of a device's tokens, tiles on the diagonal, and whole ones
    assert count_tiles(4) == (2, 2, 7)
    # Rows of 256 bytes: q, y, and two of 512 bytes once; k and v of each visited block.
    assert forward.moved == 16 * (2048 * (2 * 256 + 2 * 512) + 10 * 512 * 2 * 256)


def test_blocks_and_what_they_cost_on_gpus():
    assert choose_blocks(128, 2) == ((128, 64), (64, 32))
    assert choose_blocks(80, 4) == ((64, 32), (32, 16))  # in blocks a head of 80 is one of 128
    sizes = TileSizes(heads=16, key_heads=4, tokens=1024, head=128, itemsize=2)
    forward, backward = count_costs("gpu", sizes, causal=True)
    assert forward.exps == 16 * 36 * 128**2 and backward.exps == 2 * 16 * 136 * 64**2
    assert forward.flops == 2 * 256 * forward.exps and backward.flops == 7 * 256 * backward.exps / 2
    # Rows of 256 bytes, of which keys have a quarter; one number of each query, and two.
    assert forward.moved == 1024 * (16 * (2 * 256 + 4) + 4 * 2 * 256)
    assert backward.moved == 1024 * (16 * (5 * 256 + 8) + 4 * 2 * 256)
    whole, _ = count_costs("gpu", sizes, causal=False)
    assert whole.exps == 16 * 1024**2
    name = f"jit(f)/while/body/{cost_scope(forward)}/attention"
    assert find_cost(name) == forward and find_cost("jit(f)/attention") is None
    assert find_cost(f"jit(f)/transpose(jvp())/while/body/jvp({cost_scope(forward)})/attention") == forward
    assert find_cost(f"jit(f)/vmap({cost_scope(forward)})/attention") is None  # that of one of several


def test_what_the_kernel_does_not_compute():
    q, k, v, _ = draw(512)
    positions = jnp.broadcast_to(jnp.arange(512), (2, 512))
    assert "got positions and kernel=True" in refused(
        lambda: dot_attention(q, k, v, positions_bt=positions, kernel=True)
    )
    short = [x[:, :100] for x in (q, k, v)]
    assert "must be a multiple of 128 for the kernel; got 100" in refused(lambda: dot_attention(*short, kernel=True))
    assert "float32 or bfloat16, for the kernel; got float16, float16, float16" in refused(
        lambda: dot_attention(*(x.astype(jnp.float16) for x in (q, k, v)), kernel=True)
    )
    wide = [jnp.zeros((1, 128, 1, 192))] * 3
    with backends.tracing_for("tpu", "TPU v5 lite"):
        message = refused(lambda: dot_attention(*wide, kernel=True))
    assert "head size must be at most 128 or a multiple of it for the kernel; got 192" in message
    with backends.tracing_for("gpu", "NVIDIA H100 80GB HBM3"):
        jax.eval_shape(partial(dot_attention, kernel=True), *wide)
        message = refused(lambda: dot_attention(*(x[..., :8] for x in wide), kernel=True))
    assert "head size must be 16 to 256 for the kernel; got 8" in message
    mesh = sk.make_mesh(jax.devices()[:N], c=N)
    ring = partial(ring_attention, axis="c", order="zigzag", kernel=True)
    for options, message in (({"block": 64}, "got block=64 and kernel=True"), ({}, "got 192")):
        attend = partial(ring, **options)
        mapped = jax.shard_map(attend, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT)
        tokens = 512 if options else 3 * 256
        arrays = [jnp.zeros((1, tokens, heads, 8)) for heads in (2, 1, 1)]
        assert message in refused(lambda mapped=mapped, arrays=arrays: mapped(*arrays))
    # Documents of a ring, which are others of queries than of keys; of one device they are the same.
    documents = jnp.zeros((1, 512), jnp.int32)
    arrays = [jnp.zeros((1, 512, heads, 16)) for heads in (2, 1, 1)]
    for devices in (1, N):
        mesh = sk.make_mesh(jax.devices()[:devices], c=devices)
        packed = lambda q, k, v, documents: ring(q, k, v, segments_bt=documents)  # noqa: E731
        mapped = jax.shard_map(packed, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT)
        with backends.tracing_for("gpu", "NVIDIA H100 80GB HBM3"):
            if devices == 1:
                jax.eval_shape(mapped, *arrays, documents)
            else:
                message = refused(lambda mapped=mapped: mapped(*arrays, documents))
    assert "must have the same documents for the kernel on GPUs" in message


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


# What the GPU's compiler alone tells. All else is as on TPUs.
@gpu
def test_the_program_of_a_gpu_holds_no_scores():
    shapes = [jax.ShapeDtypeStruct((1, 16_384, heads, 128), jnp.bfloat16) for heads in (4, 2, 2)]
    mesh = sk.abstract_mesh(c=4)
    attend = partial(ring_attention, axis="c", order="zigzag", kernel=True)
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT)
    step = jax.jit(partial(differentiate, lambda q, k, v, segments_bt: mapped(q, k, v)))
    report = sk.aot.compile(step, (*shapes, None), topology="h100:1x1x4")
    # The scores of one tile are 64 MiB.
    assert report.memory.temp < 4 * 2048 * 2048 * 4
    assert report.compute.kernels == 0
    # Of nine tiles two are causal: of those 136 of 256 squares of 128 are computed forward, and 528 of 1,024 of 64.
    forward = 7 + 2 * 136 / 256
    backward = 7 + 2 * 528 / 1024
    assert report.compute.flops == (2 * forward + 7 * backward) * 4 * 2 * 2048 * 2048 * 128


# The types, the promotion of dtypes and the first checks of a whole step.
@pytest.mark.deep
@pytest.mark.parametrize(
    "topology", [pytest.param("v5e:2x2", marks=tpu), pytest.param("h100:1x1x4", marks=gpu)], ids=["tpu", "gpu"]
)
def test_a_step_with_the_kernel_is_compiled(topology):
    config = transformer.Config(vocabulary=128, layers=1, dim=256, heads=4, kv_heads=2, hidden=256)
    mesh = sk.abstract_mesh(data=2, context=2)
    plan = sk.chain(sk.dp("data"), sk.cp("context"))
    params = jax.eval_shape(lambda: transformer.init(jax.random.key(0), config))
    tokens = jax.ShapeDtypeStruct((2, 1024), jnp.int32)
    grad_fn = sk.value_and_grad(transformer.loss_fn(config, transformer.Axes(context="context", kernel=True)))
    init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=plan, precision="bf16")
    report = sk.aot.compile(step, (init.abstract(params), {"tokens": tokens, "targets": tokens}), topology=topology)
    assert report.fits and report.compute.kernels == 0
