"""Compiled programs equal what was traced, for all inputs: partitioner programs, shard_maps, and edited modules."""

from fractions import Fraction
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit._jax import compat
from shardkit.analysis.hlo.proto import read_groups
from shardkit.testing.exact import assert_compiled_equal, imported
from shardkit.testing.exact.certificate import describe_folded_constants
from shardkit.testing.exact.compiled import _make_inputs
from shardkit.testing.exact.compiled_pair import CompiledPair, ReplicationError
from shardkit.testing.exact.draws import choose_effort
from shardkit.testing.exact.imported import ImportedProgram
from shardkit.testing.exact.numbers.folded import explain_constants, explain_inverses
from shardkit.testing.exact.stablehlo import listed_groups, scalar_rules
from shardkit.testing.exact.stablehlo.attributes import DTYPES, UnreadableError
from shardkit.testing.exact.stablehlo.device_rules import _find_axes
from shardkit.testing.exact.stablehlo.source_lines import make_caller
from support.written import run_text

pytestmark = pytest.mark.optimized

NEWER = jax.__version_info__ >= (0, 11)
RNG = np.random.default_rng(3)


@pytest.fixture(scope="module")
def mesh():
    return sk.make_mesh(data=4, model=2)


def draw(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def put(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def mlp(up, down, x):
    return jnp.mean((jnp.tanh(x @ up) @ down - x) ** 2)


def attention(q, k, v):
    return jax.nn.softmax(q @ k.T) @ v


def layer_norm(x, scale):
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale[None]


def recurrence(x, w):
    return lax.scan(lambda c, row: (jnp.tanh(c @ w + row), c.sum()), jnp.zeros(4), x)


def embed(table, weights):
    tokens = jnp.asarray([[3, 1], [0, 7], [7, 7], [2, 5]])
    return (table[tokens] * weights[:, None, :]).sum(1)


def constrained(mesh):
    def apply(x, w):
        hidden = lax.with_sharding_constraint(jnp.maximum(x @ w, 0), NamedSharding(mesh, P("data", "model")))
        return hidden.sum(0), hidden.max()

    return apply


# Each is a program that the partitioner splits, with the specs of its arguments.
PROGRAMS = {
    "two matmuls and their gradients": (
        jax.grad(mlp, (0, 1)),
        [(4, 6), (6, 4), (8, 4)],
        [(None, "model"), ("model",), ("data",)],
    ),
    "attention": (attention, [(8, 4), (8, 4), (8, 4)], [("data",), ("model",), (None, "model")]),
    "a norm along a dim that is split": (layer_norm, [(4, 8), (8,)], [(None, "data"), ("model",)]),
    "a scan": (recurrence, [(8, 4), (4, 4)], [("data",), (None, "model")]),
    "a table and its gradient": (
        lambda t, w: jax.grad(lambda t: embed(t, w).sum())(t),
        [(8, 4), (4, 4)],
        [("data",), ()],
    ),
    "a sort": (lambda x: (jnp.sort(x, 0), jnp.argsort(-x, 0)), [(8, 2)], [("data",)]),
    "the largest of each row": (lambda x: lax.top_k(x, 2), [(8, 6)], [("data", "model")]),
    "the place of the largest": (lambda x: jnp.argmax(x, 0), [(8, 2)], [("data",)]),
    "a convolution": (
        lambda x, k: lax.conv_general_dilated(x, k, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")),
        [(4, 8, 4), (3, 4, 4)],
        [("data", None, "model"), ()],
    ),
    "running sums": (lambda x: jnp.cumsum(x, 0), [(8, 2)], [("data",)]),
    "a transpose": (lambda x: x.T @ x, [(8, 4)], [("data", "model")]),
    "a branch": (lambda x: lax.cond(x.sum() > 0, jnp.exp, lambda y: -y, x), [(8, 2)], [("data",)]),
}


# proves N49: also behind the compiler
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_the_partitioner_made(name, mesh):
    """Alone in running each operation of the reader on a program that a compiler made."""
    function, shapes, specs = PROGRAMS[name]
    args = [put(mesh, draw(*shape), *spec) for shape, spec in zip(shapes, specs, strict=True)]
    proof = assert_compiled_equal(jax.jit(function), *args)
    assert "8 devices (cpu" in proof.what
    assert not any("compiler" in assumption for assumption in proof.assumed)


def test_random_numbers_are_those_of_the_keys(mesh):
    """Catches draws of the trace that are not jax's own, as they are in all other proofs."""

    def drop(x, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)

    assert_compiled_equal(jax.jit(drop), put(mesh, draw(8, 4), "data"), jax.random.key(3))


KERNELS = {
    "all_reduce": (lambda x: sk.all_reduce(x, "data"), P()),
    "all_reduce of the minor axis": (
        lambda x: sk.all_reduce(x * lax.axis_index("model").astype(x.dtype), "model"),
        P("data"),
    ),
    "all_gather": (lambda x: sk.all_gather(x, "data") * 2, P()),
    "reduce_scatter": (lambda x: sk.reduce_scatter(jnp.tile(x, (4, 1)), "data"), P("data")),
    "all_to_all": (lambda x: sk.all_to_all(x, "data", split_dim=1, concat_dim=0), P(None, "data")),
    "shift": (lambda x: sk.shift(x, "data"), P("data")),
    "a maximum": (lambda x: sk.all_reduce(x, "data", op="max"), P()),
}


@pytest.mark.parametrize("name", KERNELS)
def test_each_collective(name, mesh):
    kernel, out_spec = KERNELS[name]
    function = jax.shard_map(kernel, mesh=mesh, in_specs=P("data"), out_specs=out_spec, check_vma=False)
    assert_compiled_equal(jax.jit(function), put(mesh, draw(8, 4), "data"))


def test_a_constraint_by_the_user(mesh):
    args = put(mesh, draw(8, 4), "data"), put(mesh, draw(4, 6))
    assert_compiled_equal(jax.jit(constrained(mesh)), *args)


def test_a_reference_that_differs(mesh):
    """Catches a comparison of the compiled program with itself."""
    x = put(mesh, draw(8, 4), "data")
    with pytest.raises(AssertionError, match=r"the result of each device is not the reference's for all inputs"):
        assert_compiled_equal(jax.jit(lambda x: x.sum(0)), x, reference=lambda x: x.sum(0) * (1 + 1e-4))


def test_integers_of_which_only_the_shape_is_given():
    """Catches a message that names another function."""
    shapes = jax.ShapeDtypeStruct((3,), "f"), jax.ShapeDtypeStruct((3,), np.int32)
    with pytest.raises(ValueError, match="assert_compiled_equal: integers, booleans and keys must be given"):
        assert_compiled_equal(jax.jit(lambda x, i: x[i]), *shapes)


def test_a_sum_that_is_missing(mesh):
    """Catches a wrong traced program that is blamed on the compiler: P() of a value that differs has no one value."""
    function = jax.shard_map(lambda x: x.sum(0), mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
    x = put(mesh, draw(8, 4), "data")
    with pytest.raises(ReplicationError, match="each result of the traced program must be one array"):
        assert_compiled_equal(jax.jit(function), x)
    with pytest.raises(AssertionError, match="not the reference's"):
        assert_compiled_equal(jax.jit(function), x, reference=lambda x: x.sum(0))


ORDER = """
func.func @key(%x: tensor<f32>) -> tensor<{kind}> {{
  %zero = stablehlo.constant dense<{zero}> : tensor<{kind}>
  %mask = stablehlo.constant dense<{mask}> : tensor<{kind}>
  %bits = stablehlo.bitcast_convert %x : (tensor<f32>) -> tensor<{kind}>
  %negative = stablehlo.compare {direction}, %bits, %zero : (tensor<{kind}>, tensor<{kind}>) -> tensor<i1>
  %flipped = stablehlo.xor %mask, %bits : tensor<{kind}>
  %key = stablehlo.select %negative, %flipped, %bits : tensor<i1>, tensor<{kind}>
  return %key : tensor<{kind}>
}}
"""


@pytest.mark.parametrize(
    ("edit", "is_order"),
    [
        ({}, True),
        ({"mask": 2147483646}, False),
        ({"zero": 1}, False),
        ({"direction": "GT"}, False),
        ({"kind": "ui32", "mask": 4294967295}, False),
    ],
)
def test_an_order_by_bits_is_that_of_floats_with_its_own_constants_alone(edit, is_order):
    """Catches a reader that takes any integers made of a float's bits for the float."""
    text = ORDER.format(**{"zero": 0, "mask": 2147483647, "direction": "LT", "kind": "i32"} | edit)
    with compat.private("interpreters.mlir.make_ir_context")():
        module = compat.private("interpreters.mlir.ir").Module.parse(text)
        *_, last = module.body.operations[0].regions[0].blocks[0].operations
        order = scalar_rules._find_total_order(last.operands[0])
        assert (order is not None) == is_order


def test_groups_of_wrong_devices(mesh, monkeypatch):
    """The order of devices of groups that are axes of a mesh is read from the module itself: StableHLO loses it."""
    args = put(mesh, draw(8, 4), "data"), put(mesh, draw(4, 4), None, "model")
    assert_compiled_equal(jax.jit(recurrence), *args)

    def exchange_devices(instruction):
        groups = [list(group) for group in read_groups(instruction)]
        if len(groups) > 1:
            groups[0][-1], groups[1][-1] = groups[1][-1], groups[0][-1]
        return groups

    monkeypatch.setattr(listed_groups, "read_groups", exchange_devices)
    with pytest.raises(AssertionError, match="of each device is not the reference's"):
        assert_compiled_equal(jax.jit(recurrence), *args)


def test_groups_over_axes_that_are_not_in_the_order_of_the_mesh(mesh):
    """Catches pieces in the order of the mesh's devices: jax 0.12 names the axes of groups, the major one first."""
    gather = jax.jit(lambda x: 2 * x, out_shardings=NamedSharding(mesh, P()))
    assert_compiled_equal(gather, put(mesh, draw(8, 4), ("model", "data")))


# Operations that the programs above do not compile to.
MAP = """
func.func @main(%x: tensor<3xf32>, %y: tensor<3xf32>) -> tensor<3xf32> {
  %result = "stablehlo.map"(%x, %y) <{dimensions = array<i64: 0>}> ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %twice = stablehlo.add %a, %a : tensor<f32>
    %difference = stablehlo.subtract %twice, %b : tensor<f32>
    stablehlo.return %difference : tensor<f32>
  }) : (tensor<3xf32>, tensor<3xf32>) -> tensor<3xf32>
  return %result : tensor<3xf32>
}
"""
UNEQUAL_GROUPS = """
func.func @main(%x: tensor<f32>) -> tensor<f32> {
  %result = "stablehlo.all_reduce"(%x) <{replica_groups = dense<[[0, 1], [2, -1]]> : tensor<2x2xi64>,
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, use_global_device_ids}> ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %sum = stablehlo.add %a, %b : tensor<f32>
    stablehlo.return %sum : tensor<f32>
  }) : (tensor<f32>) -> tensor<f32>
  return %result : tensor<f32>
}
"""


def test_a_function_of_each_element():
    [result] = run_text(MAP, np.arange(3, dtype="f"), np.ones(3, "f"))
    assert result.tolist() == [-1, 1, 3]


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ([[0, 2], [1, 3], [4, 6], [5, 7]], ("b",)),
        ([[5, 7], [0, 2], [4, 6], [1, 3]], ("b",)),
        ([[0, 1, 4, 5], [2, 3, 6, 7]], ("a", "c")),
        ([[0, 1, 2, 3, 4, 5, 6, 7]], ("a", "b", "c")),
        ([[2, 0], [1, 3], [4, 6], [5, 7]], None),
        ([[0, 4, 1, 5], [2, 6, 3, 7]], None),
        ([[0, 3], [1, 2], [4, 7], [5, 6]], None),
    ],
)
def test_the_axes_over_which_groups_run(groups, axes):
    """Catches a group in another order, which a gather over axes would not keep."""
    assert _find_axes({"a": 2, "b": 2, "c": 2}, np.asarray(groups)) == axes


def test_devices_in_another_order_have_no_axis_of_the_module():
    """Catches a spec that is read along an axis which is named alike, but has the devices in another order."""
    devices = jax.devices()[:4]
    backwards = jax.sharding.NamedSharding(sk.make_mesh(devices[::-1], device=4), P("device"))
    assert imported.find_mesh([backwards], devices) is None
    layout = imported.make_layout(backwards, jax.ShapeDtypeStruct((8,), "f"), devices, {"device": 4})
    assert layout.spec is None
    assert layout.starts.tolist() == [[6], [4], [2], [0]]


FAR_START = """
func.func @main(%x: tensor<8xf32>, %start: tensor<ui32>) -> tensor<2xf32> {
  %piece = stablehlo.dynamic_slice %x, %start, sizes = [2] : (tensor<8xf32>, tensor<ui32>) -> tensor<2xf32>
  return %piece : tensor<2xf32>
}
"""


@pytest.mark.parametrize(("start", "first"), [(3, 3), (2**31 + 5, 6)])
def test_a_start_beyond_the_largest_int32(start, first):
    """Catches a start that becomes negative, and so is clamped to the other end."""
    [piece] = run_text(FAR_START, np.arange(8, dtype="f"), jnp.uint32(start))
    assert piece.tolist() == [first, first + 1]


TOTAL_ORDER = """
func.func @main(%x: tensor<f32>, %y: tensor<f32>) -> tensor<i1> {{
  %result = stablehlo.compare {direction}, %x, %y, TOTALORDER : (tensor<f32>, tensor<f32>) -> tensor<i1>
  return %result : tensor<i1>
}}
"""


def test_equality_in_the_total_order_is_refused():
    """Catches -0 and 0, which are other numbers in this order, as equal ones."""
    zeros = np.float32(-0.0), np.float32(0.0)
    [is_less] = run_text(TOTAL_ORDER.format(direction="LT"), *zeros)
    assert bool(is_less)
    with pytest.raises(UnreadableError, match="compare EQ in the total order"):
        run_text(TOTAL_ORDER.format(direction="EQ"), *zeros)


ADDED_AS_FLOAT32 = """
func.func @main(%x: tensor<3xbf16>) -> tensor<bf16> {
  %zero = stablehlo.constant dense<0.0> : tensor<bf16>
  %total = "stablehlo.reduce"(%x, %zero) <{dimensions = array<i64: 0>}> ({
  ^bb0(%a: tensor<bf16>, %b: tensor<bf16>):
    %wide_a = stablehlo.convert %a : (tensor<bf16>) -> tensor<f32>
    %wide_b = stablehlo.convert %b : (tensor<bf16>) -> tensor<f32>
    %sum = stablehlo.add %wide_a, %wide_b : tensor<f32>
    %result = stablehlo.convert %sum : (tensor<f32>) -> tensor<bf16>
    stablehlo.return %result : tensor<bf16>
  }) : (tensor<3xbf16>, tensor<bf16>) -> tensor<bf16>
  return %total : tensor<bf16>
}
"""


def test_a_sum_of_bfloat16_that_is_added_as_float32():
    """Catches a reader that knows a sum without conversions alone, and refuses a scatter by it."""
    program = jax.make_jaxpr(lambda x: run_text(ADDED_AS_FLOAT32, x))(jnp.ones(3, jnp.bfloat16))
    assert [equation.primitive.name for equation in program.eqns].count("reduce_sum") == 1


def test_groups_of_different_sizes_are_refused():
    """Catches a reader that takes the -1 behind a smaller group for a device."""
    with pytest.raises(UnreadableError, match="all_reduce over groups of different sizes"):
        run_text(UNEQUAL_GROUPS, np.ones((), "f"))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_constant_of_16_bits(dtype):
    """Catches a bfloat16 of 0.9, which is 0.8984375, that stands for 9/10 beside XLA's float32 of its inverse."""

    def drop(x):
        return (x.astype(dtype) / dtype(0.9)).astype(jnp.float32)

    assert_compiled_equal(jax.jit(drop), draw(3))


@pytest.mark.parametrize("count", [3, 200])  # MLIR prints numbers, or of many their bytes
@pytest.mark.parametrize("name", ["bf16", "f8E4M3FN", "i4"])
def test_a_constant_of_a_dtype_that_numpy_does_not_have(name, count):
    """Catches a table of bfloat16 that ends in a TypeError of jaxlib, which gives no buffer of it."""
    dtype = DTYPES[name]
    numbers = np.resize(np.asarray([1, -2.5, 0.3]).astype(dtype), count)
    listed = ", ".join(str(int(x)) if name == "i4" else f"{float(x):e}" for x in numbers)
    (result,) = run_text(
        f"""
module {{
  func.func @main() -> tensor<{count}x{name}> {{
    %0 = stablehlo.constant dense<[{listed}]> : tensor<{count}x{name}>
    return %0 : tensor<{count}x{name}>
  }}
}}
"""
    )
    assert result.dtype == dtype
    np.testing.assert_array_equal(np.asarray(result), numbers)


def test_a_constant_of_bits():
    """Catches an infinity of bfloat16, which MLIR prints by its bits, as a number."""
    (result,) = run_text(
        """
module {
  func.func @main() -> tensor<2xbf16> {
    %0 = stablehlo.constant dense<[0xFF80, 1.0]> : tensor<2xbf16>
    return %0 : tensor<2xbf16>
  }
}
"""
    )
    np.testing.assert_array_equal(np.asarray(result, "f"), np.asarray([-np.inf, 1], "f"))


def test_a_table_of_bfloat16():
    table = np.asarray([1, -2.5, 0.3]).astype(jnp.bfloat16)
    assert_compiled_equal(jax.jit(lambda x: (x * 2, jnp.asarray(table))), draw(3))


def divide_short(x, y):
    """A dropout in bfloat16, of which a compiler for GPUs makes a product: 0.9 is 0.8984375 there."""
    x, y = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
    return (x / jnp.bfloat16(0.9) + y * jnp.bfloat16(1.25)).astype(jnp.float32)


def multiply_short(x, y, inverse=1.109375, factor=1.25):
    x, y = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
    return (x * jnp.bfloat16(inverse) + y * jnp.bfloat16(factor)).astype(jnp.float32)


def multiply_wide(x, y):
    product = x * np.float32(1.109375)
    return (product.astype(jnp.bfloat16) + y.astype(jnp.bfloat16) * jnp.bfloat16(1.25)).astype(jnp.float32)


def prove_as_compiled(function, reference):
    """Proves one traced function equal to another, as if the first one were a compiled program."""
    x, y = draw(3), draw(3)
    pair = CompiledPair(None, jax.make_jaxpr(function)(x, y), jax.make_jaxpr(reference)(x, y), IDENTITY, ("",))
    return pair.prove("test", "", "result", partial(_make_inputs, [x, y]), 3, choose_effort(0.1))


IDENTITY = jax.make_jaxpr(lambda x: [x])(np.zeros(3, "f"))


def test_an_inverse_in_bfloat16():
    """Catches a right program that is refuted: the compiler rounds the inverse of a divisor to bfloat16."""
    evidence = prove_as_compiled(multiply_short, divide_short)
    assert describe_folded_constants(evidence) == ["the constant 1.109375 is 1 / 0.8984375 in bfloat16, rounded"]
    assert not prove_as_compiled(multiply_short, multiply_short).folded


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(partial(multiply_short, inverse=1.125), id="another constant"),
        pytest.param(partial(multiply_short, inverse=1.1015625), id="one unit less"),
        pytest.param(partial(multiply_short, inverse=-1.109375), id="another sign"),
        pytest.param(partial(multiply_short, inverse=1.25, factor=1.109375), id="at the other's place"),
        pytest.param(partial(multiply_short, factor=1.109375), id="in place of another, too"),
        pytest.param(multiply_wide, id="of float32"),
    ],
)
def test_what_is_no_inverse_in_bfloat16(wrong):
    """Catches a constant that stands for an inverse because it is near to it, or elsewhere than the inverse."""
    with pytest.raises(AssertionError, match="is not the reference's for all inputs"):
        prove_as_compiled(wrong, divide_short)


def test_an_inverse_that_both_sides_have():
    """Catches a constant of both sides that stands for another number on one of them."""

    def divide_and_multiply(x, y):
        return divide_short(x, y) + multiply_short(y, x)

    def multiply_twice(x, y):
        return multiply_short(x, y) + multiply_short(y, x)

    with pytest.raises(AssertionError, match="is not the reference's for all inputs"):
        prove_as_compiled(multiply_twice, divide_and_multiply)


def test_an_inverse_of_both_dtypes():
    """Catches a constant in float32, of which a compiler would have computed the inverse to more digits."""

    def divide_both(x, y):
        return divide_short(x, y) + x / np.float32(0.8984375)

    def multiply_both(x, y):
        return multiply_short(x, y) + x * np.float32(1.109375)

    with pytest.raises(AssertionError, match="is not the reference's for all inputs"):
        prove_as_compiled(multiply_both, divide_both)


def test_the_divisor_of_an_inverse():
    """Catches one of two divisors that have the same inverse; then it is the one that the compiled program has lost."""
    inverse = (1.109375, "bfloat16")
    first, second = (0.8984375, "bfloat16"), (0.90234375, "bfloat16")
    assert not explain_inverses({inverse}, {first, second})
    [folded] = explain_inverses({inverse, second}, {first, second}).values()
    assert folded.ratio == 1 / Fraction(0.8984375)
    assert not explain_inverses({(0.0, "bfloat16")}, {(-np.inf, "bfloat16"), (1.0, "bfloat16")})


FIRST, SECOND = np.float32(0.9), np.float32(0.013)


def test_constants_that_need_not_stand_for_others():
    """Catches an assumption without need: two operations give the bits of many constants."""

    def scale(x, y):
        return x * (FIRST * FIRST) + (y * (FIRST * FIRST * SECOND) + x) - x

    def reference(x, y):
        return x * FIRST * FIRST + y * SECOND * 0

    evidence = prove_as_compiled(lambda x, y: scale(x, y - y), reference)
    assert describe_folded_constants(evidence) == ["the constant 0.809999943 is 0.9 * 0.9, rounded"]


def test_positions_are_no_constants_that_are_folded():
    """Catches a program of many tokens, whose positions leave no room for the constants of its optimizer."""
    rate, root = float(np.float32(0.01)), float(np.float32(2**0.5))
    product = float(np.float32(0.01) * np.float32(2**0.5)), "float32"
    positions = {(float(number), "float32") for number in range(3, 70)}
    folded = explain_constants({product}, {(rate, "float32"), (root, "float32"), *positions})
    assert folded[product].words == "0.01 * 1.414214"


def test_constants_that_the_compiler_computed_stand_for_what_they_were_computed_of(mesh):
    """XLA multiplies constants in float32, and the certificate says of which ones."""

    def scale(x):
        return (x * np.float32(0.9) ** 7 * np.float32(1.1)) * np.float32(0.37)

    proof = assert_compiled_equal(jax.jit(scale), put(mesh, draw(8, 4), "data"))
    if not NEWER:  # whose XLA leaves the three products as they are
        assert any("rounded" in sentence and "0.37" in sentence for sentence in proof.assumed)


def test_a_folded_constant_is_of_those_that_were_lost(mesh):
    """Catches 0.01 / 0.70710677 for 0.01 * 1.4142135, which has the same bits."""

    def scale(x):
        return (x * np.float32(2**0.5)) * np.float32(0.01) + jnp.tanh(x) * np.float32(0.5**0.5)

    assert_compiled_equal(jax.jit(scale), put(mesh, draw(8, 4), "data"))


@pytest.mark.parametrize("factors", [(0.9, 1.1, 0.37, 1.7, 0.77, 1.3), (1.1,) * 60], ids=["short", "long"])
def test_a_chain_of_constants_is_not_decided(mesh, factors):
    """Catches a right program that is refuted, because float32 rounds sixty products by more than one in a million."""

    def scale(x):
        for factor in factors:
            x = x * np.float32(factor)
        return x

    if NEWER:
        assert_compiled_equal(jax.jit(scale), put(mesh, draw(8, 4), "data"))
        return
    with pytest.raises(ValueError, match="not decided"):
        assert_compiled_equal(jax.jit(scale), put(mesh, draw(8, 4), "data"))


def test_two_updates_by_adam():
    optimizer = optax.adam(1e-2)

    @jax.jit
    def update_twice(params, state, first, second):
        for gradients in (first, second):
            updates, state = optimizer.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    params = jnp.ones(3)
    with jax.numpy_dtype_promotion("standard"):  # optax takes a float to the power of an integer
        assert_compiled_equal(update_twice, params, optimizer.init(params), params, params)


TRACED = jax.jit(jnp.sum).trace(np.zeros(3, "f"))
# An array of which this process has no piece.
ELSEWHERE = SimpleNamespace(shape=(8,), dtype=np.dtype("f"), is_fully_addressable=False)


@pytest.mark.parametrize(
    ("function", "args", "error", "message"),
    [
        (np.sum, (np.zeros(3, "f"),), TypeError, "assert_compiled_equal: function must be one of jax.jit"),
        (TRACED, (np.zeros(3, "f"),), TypeError, r"got Traced\. Pass jax\.jit\(function\)\."),
        (
            jax.jit(jnp.sum),
            ({"x": ELSEWHERE},),
            ValueError,
            r"must be on devices of this process; args\[0\]\['x'\], float32\[8\], has .*Prove the function in one",
        ),
        (jax.jit(jnp.sum), (np.zeros(3, "i4"),), ValueError, "at least one input must be an array of floats"),
        (jax.jit(jnp.linalg.cholesky), (np.eye(3, dtype="f"),), ValueError, "custom_call to .* has none"),
    ],
)
def test_wrong_calls(function, args, error, message):
    with pytest.raises(error, match=message):
        assert_compiled_equal(function, *args)


def test_a_training_step(mesh):
    """Catches arguments in another order than those of the program: the key of a state stays outside of it."""

    def loss_fn(w, x, keys):
        return sk.Mean.of((sk.dropout(x, keys, 0.5) @ w) ** 2)

    plan = sk.chain(sk.dp("model"), sk.fsdp("data", min_size=1))
    init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(0.1), mesh=mesh, plan=plan)
    state = init(draw(4), jax.random.key(3))
    batch = draw(8, 4)
    assert assert_compiled_equal(step, state, batch).what.startswith("step as compiled on 8 devices")

    def train(state, batch, rate):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(state.params)
        metrics = {"loss": loss, "weight": jnp.float32(8)}
        return state._replace(params=state.params - rate * grad, step=state.step + 1), metrics

    plain_loss = sk.value_and_grad(lambda w, x, keys: sk.Mean.of((x @ w) ** 2))
    init, step = sk.make_train_step(plain_loss, optax.sgd(0.1), mesh=mesh, plan=plan)
    state = init(draw(4), jax.random.key(3))
    assert_compiled_equal(step, state, batch, reference=lambda state, batch: train(state, batch, np.float32(0.1)))
    with pytest.raises(AssertionError, match="not the reference's for all inputs"):
        assert_compiled_equal(step, state, batch, reference=lambda state, batch: train(state, batch, np.float32(0.2)))


def test_a_program_that_is_too_large_is_not_compiled(monkeypatch):
    """Catches a proof that compiles for minutes what it then refuses."""
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    x = jax.ShapeDtypeStruct((4096, 4096), np.float32)
    with pytest.raises(
        ValueError, match=r"shapes must be small, .* \[4096, 4096\] at .*Shrink batch, sequence, widths"
    ):
        assert_compiled_equal(jax.jit(lambda x: x @ x @ x), x)


def test_donated_arguments():
    """A proof donates nothing, and refuses what was donated before: its integers are gone."""
    step = jax.jit(lambda x, count: (x * count, count + 1), donate_argnums=(0, 1))
    x, count = jnp.ones(3), jnp.asarray(2)
    assert_compiled_equal(step, x, count)
    assert not x.is_deleted() and not count.is_deleted()
    step(x, count)
    with pytest.raises(
        ValueError, match=r"must not have been donated; args\[0\], float32\[3\], was donated to an earlier"
    ):
        assert_compiled_equal(step, x, count)


def test_a_line_of_the_source_is_that_of_the_operation():
    """Catches a reader whose operations stand at lines of the reader."""
    caller = make_caller('loc("jit(f)/add"(callsite("loss_fn"("/a/model.py":12:8) at "<module>"("/a/train.py":3:0))))')
    traced = jax.make_jaxpr(lambda x: caller(lambda: x + 1))(1.0)
    frames = [(frame.file_name, frame.line_num) for frame in traced.eqns[0].source_info.traceback.frames]
    assert frames.index(("/a/model.py", 12)) + 1 == frames.index(("/a/train.py", 3))


def test_unused_arguments_and_keys(mesh):
    compiled = jax.jit(lambda unused, x: x * 2).lower(np.zeros(3), np.zeros(4, "f")).compile()
    assert ImportedProgram.of(compiled).kept == (1,)
    assert assert_compiled_equal(jax.jit(lambda unused, x: x * 2), np.zeros(3, "f"), np.zeros(4, "f"))
