"""The strategies: what they draw, that it is legal, and that they shrink to the smallest mesh."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import find, given, settings
from hypothesis.errors import NoSuchExample
from jax.sharding import PartitionSpec

import shardkit as sk
from shardkit.meshes.layout import canonical, local_shape
from shardkit.testing import meshes, programs, sharded_arrays
from shardkit.testing.certify import factorizations
from shardkit.testing.chains import DTYPES, BlockState, Chain, Op, legal_ops, state_of
from shardkit.testing.strategies import specs
from support.refusals import raises, value_error

QUICK = settings(max_examples=300, deadline=None, derandomize=True, database=None)


def test_every_factorisation_of_up_to_eight_devices_is_a_mesh():
    for k, count in ((1, 8), (2, 20), (3, 38)):
        ways = factorizations(8, k)
        assert len(set(ways)) == len(ways) == count
        assert all(math.prod(sizes) <= 8 and len(sizes) == k for sizes in ways)
    assert (2, 1, 4) in factorizations(8, 3)


def test_they_shrink_to_the_smallest():  # proves F73
    assert find(meshes(), lambda m: True, settings=QUICK) == {"a": 1}
    assert find(meshes(), lambda m: math.prod(m.values()) > 2, settings=QUICK) == {"a": 3}
    assert find(meshes(), lambda m: len(m) == 2 and m["b"] > 2, settings=QUICK) == {"a": 1, "b": 3}
    array = find(sharded_arrays(), lambda a: True, settings=QUICK)
    assert (array.value.shape, array.spec, array.sizes) == ((), PartitionSpec(), {"a": 1})
    assert find(programs(), lambda p: True, settings=QUICK) == Chain({"a": 1}, (1,), "float32", (), 0)
    moved = find(programs(), lambda p: any(op.kernel == "all_gather" for op in p.ops), settings=QUICK)
    assert moved == Chain({"a": 1}, (1,), "float32", (Op("all_gather", ("a",), (("dim", 0),)),), 0)


@given(sharded_arrays())
def test_arrays_are_split_evenly_and_whole_numbered(array):
    assert all(size >= 1 for size in local_shape(array.value.shape, array.spec, sk.abstract_mesh(**array.sizes)))
    values = array.value.astype(np.float64)
    assert np.array_equal(values, np.round(values)) and np.abs(values).max(initial=0) <= 3


def test_what_they_draw_where_nothing_is_said():
    """One device more than eight is not there; an integer or boolean is not a normal draw cut off."""
    with pytest.raises(NoSuchExample):
        find(meshes(), lambda m: math.prod(m.values()) > 8, settings=QUICK)
    drawn = find(sharded_arrays({"a": 1}, integer_valued=False, dtypes=("bool",)), lambda a: not a.value.all())
    assert not drawn.value.all()


WHOLE, BRAIN = BlockState((3, 4), "int32", 2.0), BlockState((2,), "bfloat16", 7.0)
LARGE = BlockState((256,), "float32", 2.0)


# A block that is too large, or an integer that its dtype does not hold, would make kernel and reference differ.
@pytest.mark.check
@pytest.mark.parametrize(
    ("state", "n", "there", "not_there"),
    [
        (LARGE, 2, ["all_gather(x, 'a', dim=0)", "gather_to_one(x, 'a', dim=0, target=1)"], []),
        (LARGE, 4, ["all_reduce(x, 'a', op='sum')"], ["all_gather", "gather_to_one"]),
        (BRAIN, 2, ["all_reduce(x, 'a', op='sum')", "op='sum', exclusive=True"], []),
        (BRAIN._replace(bits=8.0), 2, ["op='max'", "all_gather"], ["op='sum'", "op='mean'"]),
        (LARGE._replace(bits=24.0), 4, ["vary(x, 'a')"], ["all_gather", "op='sum'"]),
        (WHOLE, 2, ["reduce_scatter(x, 'a', dim=1", "split_dim=1"], ["reduce_scatter(x, 'a', dim=0", "split_dim=0"]),
        (WHOLE, 3, ["reduce_scatter(x, 'a', dim=0", "split_dim=0"], ["op='mean'", "split_dim=1"]),
        (WHOLE, 1, ["broadcast(x, 'a', source=0)"], ["op='any'", "op='all'", "source=1"]),
        (WHOLE, 4, ["source=0", "source=3", "target=3", "exclusive=True", "by=2"], ["op='max', exclusive=True"]),
        (BlockState((2,), "bool", 1.0), 2, ["op='any'", "op='all'", "op='mean'"], []),
    ],
)
def test_which_collectives_fit_a_block(state, n, there, not_there):
    lines = [str(op) for op in legal_ops(state, ("a",), {"a": n})]
    assert lines[0] == "vary(x, 'a')" and len(set(lines)) == len(lines)
    for text in there:
        assert any(text in line for line in lines), text
    for text in not_there:
        assert not any(text in line for line in lines), text


@pytest.mark.check
def test_the_block_after_a_collective_is_what_it_returns():
    """By the references of the kernels, for every collective that fits; integers stay within the bits that are told."""
    sizes = {"a": 2, "b": 4}
    for dtype, axes in itertools.product(DTYPES, (("a",), ("b", "a"))):
        for op in legal_ops(BlockState((8, 2), dtype, 2.0), axes, sizes):
            program = Chain(sizes, (8, 2), dtype, (op,), 3)
            found, result = state_of(program), program.reference(program.blocks())
            assert (found.shape, found.dtype) == (result.shape[2:], str(result.dtype)), op
            assert np.abs(result.astype(np.float64)).max() <= 2**found.bits, op


@given(sharded_arrays(integer_valued=False, dtypes=("bfloat16",)))
def test_arrays_of_normal_draws(array):
    assert array.value.dtype == jnp.bfloat16


@given(specs((4, 6), {"a": 2, "b": 3, "c": 1}))
def test_specs_divide(spec):
    local_shape((4, 6), spec, sk.abstract_mesh(a=2, b=3, c=1))
    assert spec == canonical(spec)


def test_a_program_is_printed_as_it_runs_and_nothing_to_draw_is_refused():
    gather, total = Op("all_gather", ("b", "a"), (("dim", 0),)), Op("all_reduce", ("a",), (("op", "sum"),))
    program = Chain({"a": 2, "b": 2}, (3,), "int32", (gather, total), 1)
    assert str(program) == (
        "mesh a=2, b=2\n"
        "x: int32[3] on each device, seed 1\n"
        "x = all_gather(x, ('b', 'a'), dim=0)\n"
        "x = all_reduce(x, 'a', op='sum')"
    )
    assert eval(repr(program)) == program
    with value_error(
        "meshes: there must be at least one device and one name; got 0 devices and names ('a', 'b', 'c'). Pass for "
        "example devices=8, names=('data', 'model')."
    ):
        meshes(devices=0)


def test_the_kit_needs_neither_hypothesis_nor_pytest():
    code = (
        "import sys, json, shardkit as sk\n"
        "sk.testing.emulate, sk.testing.assert_same_training, sk.census, sk.analysis\n"
        "before = sorted({'hypothesis', 'pytest', '_pytest'} & set(sys.modules))\n"
        "sk.testing.meshes\n"
        "print(json.dumps([before, 'hypothesis' in sys.modules]))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(out) == [[], True]
    with raises(AttributeError, "module 'shardkit.testing' has no attribute 'nothing'"):
        _ = sk.testing.nothing
    assert all(hasattr(sk.testing, name) for name in sk.testing.__all__)


@pytest.mark.deep
def test_proof_throughput_smoke(tmp_path):
    file, root = tmp_path / "out.jsonl", Path(__file__).parents[2]
    command = [sys.executable, "-m", "benchmarks.proof_throughput", "--smoke", "--json", str(file)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (record,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert (record["benchmark"], record["row"]) == ("proof_throughput", "3 random programs, emulated")
    assert record["cpu_us_median"] > 0 and "programs a second" in done.stdout
