"""Programs that the compilers of absent chips made equal what was traced; each row of meaning has a wrong pair."""

import json
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardkit as sk
from shardkit.analysis.hlo import topology as topologies
from shardkit.analysis.hlo.proto import read_groups
from shardkit.analysis.hlo.protobuf import write_field
from shardkit.testing.exact import assert_compiled_equal
from shardkit.testing.exact.compiled import _make_inputs
from shardkit.testing.exact.compiled_pair import CompiledPair
from shardkit.testing.exact.draws import choose_effort
from shardkit.testing.exact.interpreter import Interpreter
from shardkit.testing.exact.numbers.field import Field, Settings
from shardkit.testing.exact.numbers.inputs import draw_input
from shardkit.testing.exact.numbers.orders import find_equal
from shardkit.testing.exact.stablehlo import listed_groups, module
from shardkit.testing.exact.stablehlo.attributes import UnreadableError
from shardkit.testing.exact.stablehlo.block_reader import BlockReader
from shardkit.testing.exact.stablehlo.instructions import (
    TARGET,
    OpenModule,
    WrittenComputation,
    WrittenInstruction,
    list_parts,
    make_tuple,
    open_module,
)
from shardkit.testing.exact.stablehlo.operation_rules import OPERATION_RULES
from shardkit.testing.exact.stablehlo.synchronous import wait_for_starts
from shardkit.testing.exact.stablehlo.tilings import drop_tilings, find_elements, keeps_order
from shardkit.testing.exact.stablehlo.typed_alike import convert_floats, split_arrays
from support.compiled_rows import list_missing
from support.compilers import gpu, tpu
from support.recorded import small
from support.written import run_text

TOPOLOGIES = ["v5e:2x4", "h100:1x1x8"]


def prove(built, topology, traced=None):
    """Proves a recorded module, equal to its trace or to another program of the same arguments."""
    pair = CompiledPair.of_absent("test", built, topology, traced or built.traced.jaxpr)
    _, args = small.layers()
    pair.prove("test", "", "result", partial(_make_inputs, jax.tree.leaves(args)), 3, choose_effort(0.1))
    return pair


# proves N49: also for chips that are not there
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_recorded_module_is_its_trace(topology):
    """Alone in reading starts and ends, tilings, and memory that nothing was written to, of a real compiler."""
    pair = prove(small.built(topology), topology)
    assert pair.imported.describe_compiler().startswith(f"8 devices ({topology}, jax 0.10")


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_recorded_module_is_no_other_program(topology):
    def mean(x, axis):
        return lax.psum(x, axis) / 2

    step, args = small.layers(mean)
    with pytest.raises(AssertionError, match="of each device is not the reference's for all inputs"):
        prove(small.built(topology), topology, step.trace(*args).jaxpr)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_groups_of_wrong_devices(topology, monkeypatch):
    """Catches starts whose groups are lost where they become one operation with their ends."""

    def exchange_devices(instruction):
        groups = [list(group) for group in read_groups(instruction)]
        if len(groups) == 4:  # those over tp
            groups[0][-1], groups[1][-1] = groups[1][-1], groups[0][-1]
        return groups

    monkeypatch.setattr(listed_groups, "read_groups", exchange_devices)
    with pytest.raises(AssertionError, match="of each device is not the reference's"):
        prove(small.built(topology), topology)


def test_memory_that_is_read_before_it_is_written():
    """Catches buffers that are taken for zeros, or for what is written to them elsewhere."""
    built = small.built("v5e:2x4")
    opened = open_module(built.module)
    for computation in opened.computations:
        for instruction in computation.instructions:
            if instruction.opcode == "dynamic-update-slice":
                instruction.opcode = "copy"
                instruction.operands = instruction.operands[:1]
    with pytest.raises((AssertionError, ValueError), match=r"not the reference's|not decided"):
        prove(built._replace(module=opened.write()), "v5e:2x4")


def test_a_start_that_something_else_reads_stays():
    """Catches a result that is read before its end: what it is then is not said."""
    starts = [make("start", 2, "all-gather-start", [1]), make("done", 3, "all-gather-done", [2])]
    computation = WrittenComputation([make("x", 1, "parameter"), *starts, make("y", 4, "negate", [3])], 4, [])
    wait_for_starts(computation)
    assert [instruction.opcode for instruction in computation.instructions] == ["parameter", "all-gather", "negate"]
    assert computation.instructions[-1].operands == [2]
    starts = [make("start", 2, "all-gather-start", [1]), make("done", 3, "all-gather-done", [2])]
    computation = WrittenComputation([make("x", 1, "parameter"), *starts, make("y", 4, "negate", [2])], 3, [])
    wait_for_starts(computation)
    assert computation.instructions[1].opcode == "all-gather-start"


def make_shape(kind, *dims, tiles=(), order=None):
    """A serialized ShapeProto; kind is xla's number of a dtype."""
    layout = b"".join(write_field(1, dim) for dim in order or range(len(dims))[::-1])
    for tile in tiles:
        layout += write_field(6, b"".join(write_field(1, size) for size in tile))
    return write_field(2, kind) + b"".join(write_field(3, size) for size in dims) + write_field(5, layout)


S32, F32, BF16 = 4, 11, 16


def make(name, number, opcode, operands=(), shape=None):
    return WrittenInstruction(number, name, opcode, list(operands), shape or make_shape(F32, 8), [])


def test_a_collective_of_several_arrays_is_one_of_each():
    shapes = make_shape(F32, 2), make_shape(F32, 3)
    both = make("sums", 3, "reduce-scatter", [1, 2], make_tuple(shapes))
    computation = WrittenComputation([make("x", 1, "parameter"), make("y", 2, "parameter"), both], 3, [])
    split_arrays(computation)
    *_, first, second, result = computation.instructions
    assert (first.operands, first.shape, second.operands, second.shape) == ([1], shapes[0], [2], shapes[1])
    assert (result.opcode, result.operands) == ("tuple", [first.number, second.number])


def test_floats_of_two_dtypes_are_converted():
    """Catches a result of the wrong array, where a sum is of several."""
    shapes = make_shape(F32, 2), make_shape(BF16, 3)
    total = make("total", 3, "all-reduce", [1, 2], make_tuple(shapes[::-1]))
    inputs = [make("x", 1, "parameter", (), shapes[0]), make("y", 2, "parameter", (), shapes[1])]
    computation = WrittenComputation([*inputs, total], 3, [])
    convert_floats(computation)
    opcodes = [instruction.opcode for instruction in computation.instructions[2:]]
    assert opcodes == [
        *("convert", "all-reduce", "get-tuple-element", "convert", "get-tuple-element"),
        "tuple",
    ]
    converted, summed, _, first, second, result = computation.instructions[2:]
    assert converted.operands == [2] and summed.operands == [1, converted.number]
    assert (result.number, result.operands) == (3, [first.number, second.number])


TILED = {"tiles": [(8, 128)]}


@pytest.mark.parametrize(
    ("source", "target", "keeps"),
    [
        (make_shape(F32, 16, 128, **TILED), make_shape(F32, 2, 8, 128, **TILED), True),
        (make_shape(F32, 16, 256, **TILED), make_shape(F32, 2, 8, 256, **TILED), True),
        (make_shape(F32, 16, 256, **TILED), make_shape(F32, 2, 2, 8, 128, **TILED), False),
        (make_shape(F32, 16, 256), make_shape(F32, 2, 2, 8, 128), True),
        (make_shape(F32, 12, 128, **TILED), make_shape(F32, 3, 4, 128, **TILED), False),  # padding between the rows
        (make_shape(F32, 8, 128, **TILED), make_shape(BF16, 8, 128, **TILED), False),
    ],
)
def test_whether_a_bitcast_keeps_the_order_of_elements(source, target, keeps):
    assert keeps_order(source, target) == keeps


def test_the_elements_of_a_bitcast_by_tiles():
    """A bitcast that names the tiles is a transpose of them; one that reads padding is none."""
    source = make_shape(F32, 4, 4, tiles=[(2, 2)])
    elements = find_elements(source, make_shape(F32, 2, 2, 2, 2))
    x = np.arange(16).reshape(2, 2, 2, 2).transpose(0, 2, 1, 3)
    assert elements == tuple(x.ravel())
    assert find_elements(make_shape(F32, 3, 4, tiles=[(2, 2)]), make_shape(F32, 4, 4, tiles=[(2, 2)])) is None
    assert find_elements(make_shape(F32, 1, 25, tiles=[(1, 128)]), make_shape(F32, 1, 1, tiles=[(1, 128)])) == (0,)


@pytest.mark.parametrize(
    ("operand", "result", "message"),
    [
        (make_shape(F32, 3, 4, tiles=[(2, 2)]), make_shape(F32, 4, 4, tiles=[(2, 2)]), "of the padding of tiles"),
        (make_shape(BF16, 4, 4, tiles=[(2, 2)]), make_shape(F32, 2, 4, tiles=[(2, 2)]), "as elements of another type"),
    ],
)
def test_the_name_of_a_bitcast_without_a_meaning(operand, result, message):
    """Catches two floats in a word that a table counts as padding."""
    bitcast = make("y", 2, "bitcast", [1], result)
    opened = OpenModule([WrittenComputation([make("x", 1, "parameter", (), operand), bitcast], 2, [])], [])
    drop_tilings(opened)
    assert bitcast.opcode == "custom-call"
    assert any(number == TARGET and message in data.decode("latin1") for number, data in bitcast.others)


def run_call(target, config, result, *arguments):
    """The result of one call of a library's function."""
    names = ", ".join(f"%a{number}" for number in range(len(arguments)))
    types = [f"tensor<{''.join(f'{size}x' for size in x.shape)}f32>" for x in arguments]
    parameters = ", ".join(f"%a{number}: {kind}" for number, kind in enumerate(types))
    text = f"""
    func.func @main({parameters}) -> {result} {{
      %r = "stablehlo.custom_call"({names}) <{{call_target_name = "{target}", api_version = 1 : i32,
        backend_config = {json.dumps(json.dumps(config))}}}> : ({", ".join(types)}) -> {result}
      return %r : {result}
    }}
    """
    return run_text(text, *arguments)[0]


MATMUL = {
    "alpha_real": 1,
    "beta": 0,
    "epilogue": "DEFAULT",
    "dot_dimension_numbers": {"lhs_contracting_dimensions": ["1"], "rhs_contracting_dimensions": ["0"]},
}
X, Y, C = np.arange(6, dtype="f").reshape(2, 3), np.arange(12, dtype="f").reshape(3, 4), np.ones((2, 4), "f")


def multiply(*arguments, result="tensor<2x4xf32>", **options):
    return run_call("__cublas$lt$matmul", {"gemm_backend_config": MATMUL | options}, result, *arguments)


def test_a_product_by_cublas():
    """Alone in holding each factor of the contract: a wrong one is another number."""
    assert np.array_equal(multiply(X, Y), X @ Y)
    assert np.array_equal(multiply(X, Y, C, alpha_real=0.5, beta=3), X @ Y / 2 + 3 * C)
    assert np.array_equal(multiply(X, -Y, epilogue="RELU"), np.maximum(X @ -Y, 0))
    dims = {"lhs_contracting_dimensions": ["0"], "rhs_contracting_dimensions": ["1"]}
    assert np.array_equal(multiply(X.T, Y.T, dot_dimension_numbers=dims), X @ Y)
    batched = {
        "lhs_batch_dimensions": ["0"],
        "rhs_batch_dimensions": ["0"],
        "lhs_contracting_dimensions": ["2"],
        "rhs_contracting_dimensions": ["1"],
    }
    product = multiply(X[None], Y[None], result="tensor<1x2x4xf32>", dot_dimension_numbers=batched)
    assert np.array_equal(product, (X @ Y)[None])


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((X, Y), {"epilogue": "BIAS"}, "with the epilogue BIAS"),
        ((X, Y), {"alpha_imag": 1}, "with alpha_imag 1"),
        ((X, Y), {"scale_mode": 2}, "with scale_mode 2"),
        ((X, Y), {"of_tomorrow": True}, "with the setting of_tomorrow"),
        ((X, Y), {"lhs_stride": "0"}, "with lhs_stride 0"),
        ((X, Y), {"result": "tensor<2x4xi32>"}, "with a result of integers"),
        ((X, Y, C), {}, "with 3 operands"),
        ((X, Y), {"beta": 1}, "with 2 operands"),
        ((X, Y), {"result": "tensor<4x2xf32>"}, "with a result of another shape"),
    ],
)
def test_a_product_beyond_the_contract_is_refused(arguments, options, message):
    with pytest.raises(UnreadableError, match=message):
        multiply(*arguments, **options)


def test_the_places_of_a_bitcast():
    assert run_call("shardkit.read_places", [2, 0], "tensor<2xf32>", np.arange(3, dtype="f")).tolist() == [2, 0]


PROMISED = """
func.func @main(%x: tensor<3xf32>, %i: tensor<2x1xi32>) -> tensor<2xf32> {
  %j = stablehlo.custom_call @AssumeGatherIndicesInBound(%i) : (tensor<2x1xi32>) -> tensor<2x1xi32>
  %r = "stablehlo.gather"(%x, %j) <{dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [0],
      start_index_map = [0], index_vector_dim = 1>, slice_sizes = array<i64: 1>}>
    : (tensor<3xf32>, tensor<2x1xi32>) -> tensor<2xf32>
  return %r : tensor<2xf32>
}
"""


def is_zero_in_field(function, *arguments):
    """bool [...]: where the result of a function of arrays is zero for all inputs."""
    program = jax.make_jaxpr(function)(*arguments)
    field = Field(Settings(2, 3))
    inputs = []
    for number, x in enumerate(arguments):
        is_float = np.issubdtype(x.dtype, np.floating)
        inputs.append(draw_input(field, f"x{number}", x.shape) if is_float else x)
    [result] = Interpreter(field).run(program, inputs)
    return find_equal(field, result, field.lift(np.zeros(result.shape, np.float32)))


def test_a_promise_of_the_compiler_that_is_broken_gives_no_place():
    """Catches a gather beyond an array that is read as clamped, or as one number that then cancels."""

    def compare(other):
        def subtract(x, indices):
            return run_text(PROMISED, x, indices)[0] - other(x, indices)

        return is_zero_in_field(subtract, np.ones(3, "f"), np.asarray([[1], [3]], np.int32)).tolist()

    assert compare(lambda x, indices: x[jnp.minimum(indices[:, 0], 2)]) == [True, False]
    assert compare(lambda x, indices: run_text(PROMISED, x, indices)[0]) == [True, False]
    assert compare(lambda x, indices: jnp.asarray([x[1], 0])) == [True, False]
    x = np.arange(3, dtype="f")
    text = PROMISED.replace('"stablehlo.gather"(%x, %j)', '"stablehlo.gather"(%x, %k)').replace(
        "  %r", "  %k = stablehlo.add %j, %j : tensor<2x1xi32>\n  %r"
    )
    with pytest.raises(UnreadableError, match=r"with indices that stablehlo\.add reads"):
        run_text(text, x, np.asarray([[1], [2]]))


ORDER_IN_A_LOOP = """
func.func @main(%x: tensor<f32>, %y: tensor<f32>) -> tensor<i1> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %mask = stablehlo.constant dense<2147483647> : tensor<i32>
  %a = stablehlo.bitcast_convert %x : (tensor<f32>) -> tensor<i32>
  %b = stablehlo.compare LT, %a, %zero : (tensor<i32>, tensor<i32>) -> tensor<i1>
  %c = stablehlo.xor %mask, %a : tensor<i32>
  %d = stablehlo.select %b, %c, %a : tensor<i1>, tensor<i32>
  %e = stablehlo.bitcast_convert %y : (tensor<f32>) -> tensor<i32>
  %f = stablehlo.compare LT, %e, %zero : (tensor<i32>, tensor<i32>) -> tensor<i1>
  %g = stablehlo.xor %mask, %e : tensor<i32>
  %h = stablehlo.select %f, %g, %e : tensor<i1>, tensor<i32>
  %r = stablehlo.compare LT, %d, %h : (tensor<i32>, tensor<i32>) -> tensor<i1>
  return %r : tensor<i1>
}
"""


def test_the_bits_of_an_order_are_not_computed():
    """A loop runs what nothing reads, and an exclusive or of the bits of an unknown float has no meaning."""

    def primitives(text):
        jaxpr = jax.make_jaxpr(lambda x, y: run_text(text, x, y))(np.float32(-1), np.float32(2))
        return [equation.primitive.name for equation in jaxpr.eqns]

    assert "xor" not in primitives(ORDER_IN_A_LOOP)
    read = ORDER_IN_A_LOOP.replace("compare LT, %d, %h", "compare LT, %d, %c")
    assert "xor" in primitives(read)
    [result] = run_text(ORDER_IN_A_LOOP, np.float32(-1), np.float32(2))
    assert bool(result)
    # Whether they are equal is asked of the bits themselves.
    [result] = run_text(
        ORDER_IN_A_LOOP.replace("compare LT, %d, %h", "compare EQ, %d, %h"), np.float32(-1), np.float32(2)
    )
    assert not bool(result)


def test_memory_of_booleans_is_refused():
    """Catches garbage that is the same at each point, and so may cancel."""
    text = """
    func.func @main(%x: tensor<f32>) -> tensor<f32> {
      %m = "stablehlo.custom_call"() <{call_target_name = "AllocateBuffer"}> : () -> tensor<i1>
      %r = stablehlo.select %m, %x, %x : tensor<i1>, tensor<f32>
      return %r : tensor<f32>
    }
    """
    with pytest.raises(UnreadableError, match="with memory of integers or booleans"):
        run_text(text, np.float32(1))


# Two rounds, each of which takes x, and the memory that the round before has found, to the next one.
MEMORY_IN_A_LOOP = """
func.func @main(%x: tensor<f32>) -> tensor<f32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %two = stablehlo.constant dense<2> : tensor<i32>
  %none = stablehlo.constant dense<0.0> : tensor<f32>
  %s:3 = stablehlo.while(%i = %zero, %a = %none, %b = %none) : tensor<i32>, tensor<f32>, tensor<f32>
   cond { %c = stablehlo.compare LT, %i, %two : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1> }
   do { %j = stablehlo.add %i, %one : tensor<i32>
    %m = "stablehlo.custom_call"() <{call_target_name = "AllocateBuffer"}> : () -> tensor<f32>
    stablehlo.return %j, %m, %a : tensor<i32>, tensor<f32>, tensor<f32> }
  %d = stablehlo.subtract %s#1, FOUND : tensor<f32>
  %r = stablehlo.add %x, %d : tensor<f32>
  return %r : tensor<f32>
}
"""


def test_memory_of_two_rounds_of_a_loop_is_not_the_same():
    """Catches memory that is one array of unknowns for all rounds, so that its difference is zero."""

    def is_x(found):
        text = MEMORY_IN_A_LOOP.replace("FOUND", found)
        return bool(is_zero_in_field(lambda x: run_text(text, x)[0] - x, np.float32(1)))

    assert is_x("%s#1") and not is_x("%s#2")


def run_collective(text, *arguments):
    """The results of a module that is written as text, on each of two devices."""
    rows = jax.sharding.PartitionSpec("x")
    run = partial(run_text, text, sizes={"x": 2})
    return sk.testing.emulate(run, {"x": 2}, rows, rows)(*arguments)


STARTED = """
func.func @main(%x: tensor<1xf32>, %y: tensor<1xf32>) -> tensor<2xf32> {
  %zero = stablehlo.constant dense<0> : tensor<2xi32>
  %g = "stablehlo.all_gather"(%x) <{all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>,
      channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids}>
    : (tensor<1xf32>) -> tensor<2xf32>
  %s = "stablehlo.custom_call"(%g) <{call_target_name = "AsyncCollectiveStart"}>
    : (tensor<2xf32>) -> tuple<tensor<1xf32>, tensor<2xf32>, tensor<2xi32>>
  %0 = stablehlo.get_tuple_element %s[0] : (tuple<tensor<1xf32>, tensor<2xf32>, tensor<2xi32>>) -> tensor<1xf32>
  %1 = stablehlo.get_tuple_element %s[1] : (tuple<tensor<1xf32>, tensor<2xf32>, tensor<2xi32>>) -> tensor<2xf32>
  %2 = stablehlo.get_tuple_element %s[2] : (tuple<tensor<1xf32>, tensor<2xf32>, tensor<2xi32>>) -> tensor<2xi32>
  %h = "stablehlo.all_gather"(%y) <{all_gather_dim = 0 : i64, replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>,
      channel_handle = #stablehlo.channel_handle<handle = 2, type = 1>, use_global_device_ids}>
    : (tensor<1xf32>) -> tensor<2xf32>
  %r = "stablehlo.custom_call"(%0, %1, %h, %2) <{call_target_name = "AsyncCollectiveDone"}>
    : (tensor<1xf32>, tensor<2xf32>, tensor<2xf32>, tensor<2xi32>) -> tensor<2xf32>
  return %r : tensor<2xf32>
}
"""


# A second one is started, and the end of the first waits for its state.
STARTED_TWICE = STARTED.replace(
    "  %r =",
    """  %t = "stablehlo.custom_call"(%g) <{call_target_name = "AsyncCollectiveStart"}>
    : (tensor<2xf32>) -> tuple<tensor<1xf32>, tensor<2xf32>, tensor<2xi32>>
  %3 = stablehlo.get_tuple_element %t[2] : (tuple<tensor<1xf32>, tensor<2xf32>, tensor<2xi32>>) -> tensor<2xi32>
  %r =""",
).replace("(%0, %1, %h, %2)", "(%0, %1, %h, %3)")


def test_a_collective_of_a_tpu_that_others_run_beside():
    """Catches an end that returns what its own collective is of, and a result that is read before its end."""
    x = np.float32([1, 2])
    y = np.float32([3, 4])
    assert run_collective(STARTED, x, y)[0].tolist() == [1, 2, 1, 2]
    other = STARTED.replace("dense<[[0, 1]]> : tensor<1x2xi64>", "dense<[[1, 0]]> : tensor<1x2xi64>", 1)
    with pytest.raises(UnreadableError, match="with another collective than was started"):
        run_collective(other, x, y)
    with pytest.raises(UnreadableError, match="of a library's workspace"):
        run_collective(STARTED.replace("  return", "  %n = stablehlo.negate %1 : tensor<2xf32>\n  return"), x, y)
    for operands in ("%0, %g, %h, %2", "%y, %1, %h, %2", "%0, %1, %h, %zero"):
        with pytest.raises(UnreadableError, match="with operands that no start has returned"):
            run_collective(STARTED.replace("(%0, %1, %h, %2)", f"({operands})"), x, y)
    with pytest.raises(UnreadableError, match="with operands that no start has returned"):
        run_collective(STARTED_TWICE, x, y)


def test_the_places_of_an_argmax_stay_integers():
    """Catches an integer result of a reduction that is written as a float."""
    places = make_shape(S32, 3)
    both = make("both", 5, "reduce", [1, 2, 3, 4], make_tuple([make_shape(BF16, 3), places]))
    inputs = [
        make("x", 1, "parameter", (), make_shape(F32, 3, 4)),
        make("i", 2, "parameter", (), make_shape(S32, 3, 4)),
        make("low", 3, "parameter", (), make_shape(F32)),
        make("zero", 4, "parameter", (), make_shape(S32)),
    ]
    computation = WrittenComputation([*inputs, both], 5, [])
    convert_floats(computation)
    reduced, *_, result = computation.instructions[4:]
    assert list_parts(reduced.shape) == [make_shape(F32, 3), places]
    opcodes = [instruction.opcode for instruction in computation.instructions[4:]]
    assert opcodes == ["reduce", "get-tuple-element", "convert", "get-tuple-element", "tuple"]
    assert result.number == 5


def test_a_reduction_that_is_rounded():
    """Catches a reduction whose terms are rounded to the dtype of its result."""
    total = make("total", 3, "reduce", [1, 2], make_shape(BF16, 3))
    inputs = [make("x", 1, "parameter", (), make_shape(F32, 3, 4)), make("y", 2, "parameter", (), make_shape(F32))]
    computation = WrittenComputation([*inputs, total], 3, [])
    convert_floats(computation)
    summed, rounded = computation.instructions[2:]
    assert (summed.opcode, summed.operands, summed.shape) == ("reduce", [1, 2], make_shape(F32, 3))
    assert (rounded.number, rounded.opcode, rounded.operands) == (3, "convert", [summed.number])
    assert rounded.shape == make_shape(BF16, 3)


def drop_conversions(serialized):
    """A module whose operations read and give floats of two dtypes, as a TPU's compiler writes them."""
    opened = open_module(serialized)
    for computation in opened.computations:
        makers = computation.by_number()
        origins = {}
        for instruction in computation.instructions:
            instruction.operands = [origins.get(operand, operand) for operand in instruction.operands]
            if instruction.opcode == "convert":
                [origin] = instruction.operands
                origins[instruction.number] = origin
                if makers[origin].opcode != "parameter":
                    makers[origin].shape = instruction.shape
        computation.instructions = [part for part in computation.instructions if part.number not in origins]
        computation.root = origins.get(computation.root, computation.root)
    return opened.write()


def pad_short(x, filling):
    return lax.pad(x, filling.astype(jnp.bfloat16), [(1, 2, 0)])


def add_short(x, y):
    return x + y.astype(jnp.bfloat16)


def sum_short(x):
    return lax.reduce(x, np.float32(0), lax.add, (1,)).astype(jnp.bfloat16)


SHORT = jnp.bfloat16([1, 2, 3])
TERMS = np.float32([[256, 1, 1, 1]] * 3)  # 256 in bfloat16 if each sum is rounded, and else 260


@pytest.mark.parametrize(
    ("function", "arguments"),
    [(pad_short, (SHORT, np.float32(7))), (add_short, (SHORT, np.float32([4, 5, 6]))), (sum_short, (TERMS,))],
)
def test_a_module_with_floats_of_two_dtypes(function, arguments, monkeypatch):
    """Alone in reading such operations from a module that is written; jaxlib itself refuses it."""
    lowered = jax.jit(function).lower(*arguments)
    written = drop_conversions(lowered.compiler_ir("hlo").as_serialized_hlo_module_proto())
    imported = module.ImportedModule(written, {})
    [result] = BlockReader(imported, OPERATION_RULES).run(imported.find_function("main"), arguments)
    assert result.dtype == jnp.bfloat16
    assert np.array_equal(result, function(*arguments))
    monkeypatch.setattr(module, "convert_floats", lambda computation: None)
    with pytest.raises(UnreadableError, match="cannot turn into StableHLO"):
        module.ImportedModule(written, {})


def draw(*shape):
    return np.random.default_rng(3).normal(size=shape).astype(np.float32)


@pytest.mark.deep
@pytest.mark.parametrize("topology", [pytest.param(TOPOLOGIES[0], marks=tpu), pytest.param(TOPOLOGIES[1], marks=gpu)])
def test_a_program_compiled_for_a_topology(topology):
    mesh = sk.make_mesh(data=4, model=2)
    x = sk.shard(draw(8, 4), mesh, jax.sharding.PartitionSpec("data"))
    w = sk.shard(draw(4, 4), mesh, jax.sharding.PartitionSpec(None, "model"))
    proof = assert_compiled_equal(jax.jit(lambda x, w: jnp.tanh(x @ w).sum(0)), x, w, topology=topology)
    assert f"8 devices ({topology}, jax" in proof.what
    with pytest.raises(AssertionError, match="not the reference's for all inputs"):
        assert_compiled_equal(
            jax.jit(lambda x, w: jnp.tanh(x @ w).sum(0)),
            *(x, w),
            topology=topology,
            reference=lambda x, w: jnp.tanh(x @ w).mean(0),
        )


def test_a_compiler_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(topologies, "find_spec", lambda package: None)
    message = "the compiler for h100 is not installed. Install it with: pip install 'shardkit[aot-gpu]'"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        assert_compiled_equal(jax.jit(jnp.sin), draw(3), topology="h100:1x1x8")


def test_what_jaxlib_does_not_know_is_named():
    with pytest.raises(UnreadableError, match="cannot turn into StableHLO"):
        module.ImportedModule(make_unknown(), {"device": 1})


def test_the_table_of_operations_without_a_meaning():
    """Alone in running the script that the page on compiled programs names."""
    opened = open_module(small.built("v5e:2x4").module)
    assert list_missing(opened.write()) == {}
    for computation in opened.computations:
        for instruction in computation.instructions:
            if instruction.opcode == "tanh":
                instruction.opcode = "custom-call"
                instruction.others = [(TARGET, write_field(TARGET, b"tomorrow"))]
    assert list_missing(opened.write()).keys() == {"tomorrow"}


def make_unknown():
    """A module whose only instruction is none."""
    opened = open_module(small.built("v5e:2x4").module)
    for computation in opened.computations:
        for instruction in computation.instructions:
            if instruction.opcode == "tanh":
                instruction.opcode = "no-such-opcode"
    return opened.write()
