"""Programs that this machine compiles and runs, as the instruments see them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.analysis import compiled, lint
from shardkit.analysis.hlo import proto
from shardkit.analysis.hlo.collectives import collectives_of, total_work
from support.refusals import refused


def kernel(x):
    return sk.all_reduce(x, "data"), sk.all_reduce(2 * x, "data"), sk.all_gather(x, "model")


def on_two_axes(mesh2x4, body, out):
    return jax.jit(jax.shard_map(body, mesh=mesh2x4, in_specs=P("data", "model"), out_specs=out))


@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("step", [1, 3, -2])
@pytest.mark.optimized
def test_trip_counts_of_loops_that_count(count, step):
    """This machine's compiler records them; without its record they are read off the condition, as on a TPU."""

    def loop(x):
        stop = step * count
        going = (lambda c: c[0] < stop) if step > 0 else (lambda c: c[0] > stop)
        return lax.while_loop(going, lambda c: (c[0] + step, lax.psum(c[1], "data") * 0.5), (0, x))[1]

    mesh = sk.make_mesh(jax.devices()[:2], data=2)
    f = jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=P(), out_specs=P()))
    data = f.lower(jnp.ones(4)).compile().runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    module = proto.read(data)
    for each in module.computations.values():
        for instruction in each.instructions.values():
            instruction.config = {}
    rows = collectives_of(module, {"data": 2})
    assert sum(r.count for r in rows) == count
    for each in module.computations.values():  # a compiler may write i <= n: one turn more
        for instruction in each.instructions.values():
            instruction.direction = {"LT": "LE", "GT": "GE"}.get(instruction.direction, instruction.direction)
    more = count > 1  # of one turn or none, no loop is left
    assert sum(r.count for r in collectives_of(module, {"data": 2})) == count + more


@pytest.mark.optimized
def test_flops_of_matmuls_with_batch_dims_and_odd_sizes():
    rng, read = np.random.default_rng(0), 0
    for b, m, k, n in [(1, 8, 16, 4), (3, 5, 7, 9), (4, 64, 32, 16)]:
        x, y = rng.normal(size=(b, m, k)).astype("f"), rng.normal(size=(b, k, n)).astype("f")
        program = jax.jit(lambda x, y: jnp.einsum("bmk,bkn->bmn", x, y)).lower(x, y).compile()
        data = program.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
        # The CPU compiler may call a library; then there is no matmul left to read.
        module = proto.read(data)
        opcodes = {i.opcode for c in module.computations.values() for i in c.instructions.values()}
        if "dot" in opcodes:
            read += 1
            assert total_work(module).flops == 2 * b * m * k * n
    assert read


@pytest.mark.optimized
def test_a_program_for_this_machine(mesh2x4):
    f = on_two_axes(mesh2x4, kernel, (P(None, "model"), P(None, "model"), P("data", ("model",))))
    found = compiled(f, jnp.ones((8, 8)))
    assert found.census.count(kind="all_reduce", axis="data") == 2
    total = sum(r.total for r in found.rows if r.kind == "all_reduce")
    assert total == found.census.sent(kind="all_reduce")
    assert [r.total for r in found.rows if r.axes == ("model",)] == [found.census.sent(axis="model")]
    memory = found.memory
    assert memory.argument == memory.held == 4 * 2 * 4  # the piece of one device
    assert memory.output >= (4 * 2 + 4 * 2 + 16 * 2) * 4  # and on a CPU the table of its three buffers
    assert memory.peak == memory.argument + memory.output - memory.alias + memory.temp + memory.generated_code


@pytest.mark.optimized
def test_expects_holds_a_compiled_program(mesh2x4):  # proves F76
    f = jax.jit(
        lambda x: jax.shard_map(lambda x: sk.all_reduce(x, "data"), mesh=mesh2x4, in_specs=P("data"), out_specs=P())(
            x
        ).sum()
    )
    x = sk.shard(jnp.ones((8, 8)), mesh2x4, P("data"))
    right = sk.expects(sk.collective("all_reduce", "data", times=1, sent=128))
    assert [row.total for row in right.check_compiled(f, x)] == [128]
    message = refused(lambda: sk.expects().check_compiled(f, x), AssertionError).splitlines()
    assert message[:2] == [
        "the compiled program does not communicate as expected:",
        "- not expected: 1 x all_reduce over 'data', 128 bytes sent",
    ]
    assert message[2].startswith("    1 x at test_on_this_machine.py:") and message[3] == "the compiler changed nothing"


@pytest.mark.optimized
def test_expects_says_what_the_compiler_added(mesh2x4):  # proves F88
    x = sk.shard(jnp.ones((8, 8)), mesh2x4, P("data"))
    with sk.expects() as check:
        check(lambda x: x.sum(), x)  # nothing is written
    with pytest.raises(AssertionError) as error:
        sk.expects().check_compiled(lambda x: x.sum(), x)
    assert "- added: 1 x all_reduce over 'data', 4 bytes at test_on_this_machine.py:" in str(error.value)


def test_the_trace_as_another_process_leaves_nothing_behind():
    asked = []

    @jax.jit
    def fn(x):
        asked.append(jax.process_index())
        return x

    fn(jnp.ones(2))
    assert lint(fn, jnp.ones(2)) == []
    assert asked == [0, 1] and jax.process_index() == 0
    fn(jnp.ones(2))
    assert asked == [0, 1]  # what was compiled before is still there
