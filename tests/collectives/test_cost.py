"""The further kernels: what each sends, against its docstring's closed form, and the wording of every error."""

import inspect
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import collectives
from shardkit.analysis import census
from shardkit.collectives import all_gather_uneven, all_reduce_tree, compressed, reduce_scatter_uneven
from support.refusals import refusals, unbound_axis

ROWS, COLUMNS = 6, 5
B = ROWS * COLUMNS * 4  # bytes of the float32 block on each device


def counted(kernel, n, dtype="float32", shape=(ROWS, COLUMNS)):
    mesh = sk.make_mesh(jax.devices()[:n], a=n, one=1)

    def device(x):
        return jax.tree.map(lambda y: sk.vary(y, ("a", "one")).reshape(1, -1), kernel(x[0]))

    f = jax.shard_map(device, mesh=mesh, in_specs=P("a"), out_specs=P(("a", "one")))
    return census(f, jax.ShapeDtypeStruct((n, *shape), dtype))


def log2(n):
    return math.ceil(math.log2(n)) if n > 1 else 0


def uneven(n):
    return tuple([ROWS, 1, 0, 4, ROWS, 2, 3, 5][:n])


COSTS = [  # kernel of the block and n, collectives and bytes as functions of n
    (lambda x, n: sk.all_reduce(x > 0, "a", op="any"), lambda n: (1, 2 * (B // 4) * (n - 1) / n)),
    (lambda x, n: sk.all_reduce(x > 0, "a", op="all"), lambda n: (1, 2 * (B // 4) * (n - 1) / n)),
    (lambda x, n: sk.broadcast(x > 0, "a"), lambda n: (1, 2 * (B // 4) * (n - 1) / n)),
    (lambda x, n: sk.broadcast(x.astype(jnp.bfloat16), "a"), lambda n: (1, 2 * (B // 2) * (n - 1) / n)),
    (lambda x, n: sk.collectives.prefix_scan(x, "a"), lambda n: (log2(n), log2(n) * B)),
    (
        lambda x, n: sk.collectives.prefix_scan(x, "a", exclusive=True),
        lambda n: ((n > 1) + log2(n - 1), ((n > 1) + log2(n - 1)) * B),
    ),
    (
        lambda x, n: sk.collectives.halo_exchange(x, "a", before=2, after=3, wrap=True),
        lambda n: (2 * (n > 1), B * (2 + 3) / ROWS * (n > 1)),
    ),
    (
        lambda x, n: sk.collectives.halo_exchange(x, "a", before=ROWS + 2, after=0),
        lambda n: (2, B * (ROWS + 2) / ROWS) if n > 2 else ((1, B) if n == 2 else (0, 0)),
    ),
    (lambda x, n: sk.collectives.gather_to_one(x, "a", dim=1), lambda n: (1, B * (n - 1))),
    (lambda x, n: collectives.unpad_from_axis(collectives.pad_to_axis(x, "a"), ROWS), lambda n: (0, 0)),
    (lambda x, n: all_gather_uneven(x, uneven(n), "a"), lambda n: (1, B * (n - 1))),
    (
        lambda x, n: reduce_scatter_uneven(jnp.tile(x, (9, 1))[: sum(uneven(n))], uneven(n), "a"),
        lambda n: (1, n * B * (n - 1) / n),
    ),
    (
        lambda x, n: compressed.all_gather(x, "a", dtype=jnp.int4, block=8),
        lambda n: (2, (n - 1) * (4 * (4 + 1))),  # 30 elements in four blocks of 8, two elements a byte
    ),
    (
        lambda x, n: compressed.reduce_scatter(jnp.tile(x, (n, 1)), "a", dtype=jnp.float8_e5m2, block=8)[0],
        lambda n: (2, (n - 1) * (4 * (8 + 1))),
    ),
    (
        lambda x, n: compressed.all_gather(x, "a", dtype="mxfp4"),
        lambda n: (2, (n - 1) * (15 + 1)),  # 30 elements in a block that is not full
    ),
    (
        lambda x, n: compressed.reduce_scatter(jnp.tile(x, (n, 2)), "a", dtype="mxfp8")[0],
        lambda n: (2, (n - 1) * 2 * (32 + 1)),  # 60 elements in two blocks
    ),
    (
        lambda x, n: compressed.all_reduce(jnp.tile(x, (n, 1)), "a", dtype="nvfp4", compress_result=True)[0],
        lambda n: (4, (n - 1) * 2 * (2 * (8 + 1) + 4)),  # 30 elements in two blocks, and the scale of the message
    ),
    (
        lambda x, n: compressed.reduce_scatter_two_level(jnp.tile(x, (n, 1)), "a", "one", dtype=jnp.int8)[0],
        lambda n: (3, n * B * (n - 1) / n),  # uncompressed inside; over one machine two messages to itself
    ),
    (
        lambda x, n: compressed.all_reduce(x, "a", dtype=jnp.int8)[0],
        lambda n: (3, (n - 1) * (-(-ROWS * COLUMNS // n) * (1 + 4) + 1)),
    ),
]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("row", range(len(COSTS)))
def test_cost(row, n):
    kernel, cost = COSTS[row]
    found = counted(lambda x: kernel(x, n), n)
    moved = [r for r in found.rows if r.sent or r.kind != "ppermute"]
    assert (len(moved), float(found.sent())) == pytest.approx(cost(n), rel=1e-12)


@pytest.mark.parametrize(("n", "blocks", "left"), [(1, 6, 3), (2, 4, 1), (3, 1, 1), (5, 6, 3), (8, 2, 1), (8, 3, 3)])
def test_cost_of_a_deterministic_sum(n, blocks, left):
    padded = 4 * -(-COLUMNS // n) * n
    found = counted(lambda x: sk.all_reduce(x, "a", deterministic=True), n, shape=(blocks, COLUMNS))
    assert float(found.sent()) == pytest.approx((left + 1) * padded * (n - 1) / n, rel=1e-12)
    half = counted(lambda x: sk.all_reduce(x, "a", deterministic=True), n, "bfloat16", shape=(blocks, COLUMNS))
    assert half.sent() == found.sent()  # its partial sums are float32
    if left == 1 and n > COLUMNS:
        assert padded == 4 * n


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_cost_of_the_derivative_of_an_extremum(n):
    def gradient(x):
        return jax.grad(lambda x: jnp.sum(sk.all_reduce(x, "a", op="max").astype(jnp.float32)))(x)

    once = 2 * (n - 1) / n
    assert float(counted(gradient, n).sent()) == pytest.approx(once * B * 2, rel=1e-12)
    assert float(counted(gradient, n, "bfloat16").sent()) == pytest.approx(once * (B / 2 + B), rel=1e-12)


FORMULAS = {
    sk.collectives.prefix_scan: "s B bytes in s steps, s = ceil(log2 n), or 1 + ceil(log2(n-1)) if exclusive; an "
    "all_gather needs n-1.",
    sk.collectives.halo_exchange: "B (before + after)/D bytes, D the block's size along `dim`, in one step for "
    "each neighbor reached.",
    sk.collectives.gather_to_one: "B (n-1) bytes in n-1 hops, B being one shard: an all_gather, because n-1 single "
    "messages are limited by the target's links just as much.",
    collectives.pad_to_axis: "none.",
    collectives.unpad_from_axis: "none.",
    all_gather_uneven: "B (n-1) bytes in n-1 hops, B being one padded shard.",
    reduce_scatter_uneven: "P (n-1)/n bytes in n-1 hops, P being the padded array: n max(sizes) rows.",
    all_reduce_tree: "2 B (n-1)/n bytes in 2 (n-1) hops per bucket, B being all its leaves, padded to a multiple of n "
    "elements where it is scattered.",
    compressed.all_gather: "Q (n-1) bytes in n-1 hops, Q = cost.quantized_bytes of one shard's elements.",
    compressed.reduce_scatter: "Q (n-1) bytes to n-1 other devices, Q = cost.quantized_bytes of 1/n of the elements.",
    compressed.reduce_scatter_two_level: "inner Q (I-1) bytes, Q = cost.quantized_bytes of 1/I of the elements, or of "
    "4 bytes each; outer Q (O-1) bytes, Q = cost.quantized_bytes of 1/(I O) of the elements.",
    compressed.all_reduce: "Q (n-1) bytes to n-1 other devices, Q = cost.quantized_bytes of 1/n of the elements, "
    "padded to a multiple of n; then as many again with compress_result, or with Q the bytes of these elements. An "
    "all_reduce sends 2 B (n-1)/n.",
}


@pytest.mark.parametrize("kernel", FORMULAS)
def test_the_docstring_states_the_cost_that_is_counted(kernel):
    cost = re.search(r"Cost: (.+?)(?=\n\n|\nSource:|\Z)", inspect.getdoc(kernel), re.DOTALL).group(1)
    assert " ".join(cost.split()) == FORMULAS[kernel]


ELSEWHERE = {  # kernels whose costs other files hold to the census
    "test_basic_cost.py": {"all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter", "shift", "vary"},
    "test_matmul.py": {"all_gather_matmul", "matmul_reduce_scatter"},
    "test_debug.py": {"debug_print"},
    "test_expert.py": {"ragged_all_to_all"},
    "they send nothing": {"assume_replicated", "axis_index", "axis_size", "vary_like"},
}


@pytest.mark.check
def test_every_kernel_has_its_cost_compared():
    public = {name for name in collectives.__all__ if inspect.isfunction(getattr(collectives, name))}
    here = {name for name in public if getattr(collectives, name) in FORMULAS}
    counted_here = {name for kernel, _ in COSTS for name in kernel.__code__.co_names}
    assert public - here == set().union(*ELSEWHERE.values())
    assert here - counted_here <= {"all_reduce_tree"}  # in test_bucketed.py


def refused(kernel, n=4):
    with pytest.raises((ValueError, TypeError)) as error:
        counted(kernel, n)
    return type(error.value), str(error.value)


SMALL = "'bfloat16', 'float8_e4m3fn', 'float8_e5m2', 'int8', 'int4', 'mxfp8', 'mxfp4' or 'nvfp4'"
BLOCKS = "Leave out block=, or pass another dtype, such as jnp.int8."
RESIDUAL = "residual must be a pytree like x of float32 arrays of the same shapes; got"
CREATE = "Begin with zeros: jax.tree.map(lambda leaf: jnp.zeros_like(leaf, jnp.float32), x)."
SIZED = "sizes must be one size of at least 0 for each device of axis 'a'; got"
ERRORS = refusals(
    {
        "all_reduce: deterministic=True needs op 'sum' or 'mean'; got 'max'. Leave deterministic out: "
        "the order changes no bit of this op.": lambda x: sk.all_reduce(x, "a", op="max", deterministic=True),
        "all_reduce: with deterministic=True dim 0 of every leaf must count this device's blocks, at least one; "
        "got shape (0, 5). Pass x[None] if each device has one block.": lambda x: sk.all_reduce(
            x[:0], "a", deterministic=True
        ),
        "halo_exchange: dim 1 must have at least one row per device; got shape (6, 0). "
        "Choose another dim, or fewer devices.": lambda x: sk.collectives.halo_exchange(x[:, :0], "a", dim=-1),
        "gather_to_one: target must be a device of the axis; got 4 over 4 devices. Choose 0 to 3.": lambda x: (
            sk.collectives.gather_to_one(x, "a", target=4)
        ),
        "unpad_from_axis: size must be from 0 to the size of dim 0; got 7 for shape (6, 5). "
        "Pass the size before padding.": lambda x: collectives.unpad_from_axis(x, 7),
        f"all_gather_uneven: {SIZED} (1, 2, 3) over 4 devices. "
        "Pass the same tuple of 4 sizes on every device.": lambda x: all_gather_uneven(x, (1, 2, 3), "a"),
        f"reduce_scatter_uneven: {SIZED} (1, 2, 4, -1) over 4 devices. "
        "Pass the same tuple of 4 sizes on every device.": lambda x: reduce_scatter_uneven(x, [1, 2, 4, -1], "a"),
        "all_gather_uneven: dim 0 must have max(sizes) = 4 rows on every device; got shape (6, 5). "
        "Pad every device's piece to it.": lambda x: all_gather_uneven(x, (1, 2, 3, 4), "a"),
        "reduce_scatter_uneven: dim 0 must have sum(sizes) = 10 rows on every device; got shape (6, 5). "
        "Pass the true sizes.": lambda x: reduce_scatter_uneven(x, (1, 2, 3, 4), "a"),
        f"compressed.all_reduce: dtype must be {SMALL}; got 'float16'. Pass for example dtype='bfloat16'.": lambda x: (
            compressed.all_reduce(x, "a", x, dtype=jnp.float16)
        ),
        f"compressed.all_gather: mxfp4 must have blocks of 32 elements; got block=16. {BLOCKS}": lambda x: (
            compressed.all_gather(x, "a", dtype="mxfp4", block=16)
        ),
        f"compressed.reduce_scatter: nvfp4 must have blocks of 16 elements; got block=64. {BLOCKS}": lambda x: (
            compressed.reduce_scatter(x, "a", dtype="nvfp4", block=64)
        ),
        "compressed.reduce_scatter_two_level: nvfp4 must have blocks of 16 elements; got block=32. "
        f"{BLOCKS}": lambda x: compressed.reduce_scatter_two_level(
            x, "a", "one", dtype="mxfp8", inner_dtype="nvfp4", block=32
        ),
        "compressed.all_reduce: block must be at least 1; got 0. Pass block=1 or more.": lambda x: (
            compressed.all_reduce(x, "a", dtype="mxfp8", block=0)
        ),
        "compressed.all_reduce: key must be one key; got keys of shape (2,). Pass one of them, or fold all with "
        "jax.vmap.": lambda x: compressed.all_reduce(x, "a", dtype="mxfp8", key=jax.random.split(jax.random.key(0))),
        "compressed.all_gather: dim must name a dimension of the array; got 0 for an array of rank 0. "
        "Choose an array of rank 1 or more.": lambda x: compressed.all_gather(x[0, 0], "a", dtype=jnp.int4),
        "compressed.reduce_scatter: dim 0 must be divisible by axis 'a'; got size 6 over 4 devices. "
        "Pad dim 0 or choose another dim.": lambda x: compressed.reduce_scatter(x, "a", dtype=jnp.int8),
        "compressed.reduce_scatter_two_level: dim 0 must be divisible by axes 'one', 'a'; got size 6 over 4 devices. "
        "Pad dim 0 or choose another dim.": lambda x: compressed.reduce_scatter_two_level(
            x, "a", "one", dtype=jnp.int8
        ),
        f"compressed.reduce_scatter: {RESIDUAL} float32[6, 5] for shapes [12, 5]. {CREATE}": lambda x: (
            compressed.reduce_scatter(jnp.tile(x, (2, 1)), "a", x, dtype=jnp.int8)
        ),
        f"compressed.all_reduce: {RESIDUAL} float32[6, 5], bfloat16[5] for shapes [6, 5], [6, 5]. {CREATE}": lambda x: (
            compressed.all_reduce([x, x], "a", [x, x[0].astype(jnp.bfloat16)], dtype=jnp.int8)
        ),
        f"compressed.all_reduce: {RESIDUAL} none for shapes [6, 5]. {CREATE}": lambda x: compressed.all_reduce(
            [x], "a", (), dtype=jnp.int8
        ),
    },
    {
        "all_reduce: op 'max' needs an order; got complex64. Pass parts, or jnp.abs(x).": lambda x: sk.all_reduce(
            jax.lax.complex(x, x), "a", op="max"
        ),
        "all_reduce: op 'any' needs booleans; got float32. Compare first, as in x != 0.": lambda x: sk.all_reduce(
            x, "a", op="any"
        ),
        "compressed.all_reduce: every leaf must be floating-point; got int32. Use all_reduce for it.": lambda x: (
            compressed.all_reduce(x.astype(jnp.int32), "a", x, dtype=jnp.int8)
        ),
        "compressed.all_gather: every leaf must be floating-point; got int32. Use all_gather for it.": lambda x: (
            compressed.all_gather(x.astype(jnp.int32), "a", dtype=jnp.int4)
        ),
        "compressed.reduce_scatter: every leaf must be floating-point; got bool. "
        "Use reduce_scatter for it.": lambda x: compressed.reduce_scatter(x > 0, "a", dtype=jnp.int4),
        "compressed.reduce_scatter_two_level: every leaf must be floating-point; got int32. "
        "Use hierarchical.reduce_scatter for it.": lambda x: compressed.reduce_scatter_two_level(
            x.astype(jnp.int32), "a", "one", dtype=jnp.int8
        ),
    },
)


@pytest.mark.parametrize("kind, message, call", ERRORS)
def test_errors_of_the_arguments(kind, call, message):
    assert refused(call) == (kind, message)


KERNELS = {
    "prefix_scan": sk.collectives.prefix_scan,
    "halo_exchange": sk.collectives.halo_exchange,
    "gather_to_one": sk.collectives.gather_to_one,
    "pad_to_axis": collectives.pad_to_axis,
    "all_gather_uneven": lambda x, axis, **options: all_gather_uneven(x, (6,) * 4, axis, **options),
    "reduce_scatter_uneven": lambda x, axis, **options: reduce_scatter_uneven(x, (2, 2, 1, 1), axis, **options),
    "all_reduce_tree": all_reduce_tree,
    "compressed.all_reduce": lambda x, axis: compressed.all_reduce(x, axis, x, dtype=jnp.int8),
    "compressed.all_gather": partial(compressed.all_gather, dtype=jnp.int8),
    "compressed.reduce_scatter": partial(compressed.reduce_scatter, dtype=jnp.int8),
    "compressed.reduce_scatter_two_level": lambda x, axis, **options: compressed.reduce_scatter_two_level(
        x, axis, "one", dtype=jnp.int8, **options
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_errors_of_axis_and_dim(name):
    kernel = KERNELS[name]
    with unbound_axis(
        f"{name}: axis 'a' is not bound here, because no shard_map surrounds this call. "
        "Call it inside jax.shard_map over a mesh with that axis."
    ):
        kernel(np.ones((6, 5), np.float32), "a")
    if name not in ("all_reduce_tree", "compressed.all_reduce"):
        unpad = name == "prefix_scan"  # which has no dim
        assert refused(lambda x: collectives.unpad_from_axis(x, 1, dim=2) if unpad else kernel(x, "a", dim=2)) == (
            ValueError,
            f"{'unpad_from_axis' if unpad else name}: dim must name a dimension of the array; "
            "got 2 for an array of rank 2. Choose 0 to 1.",
        )
