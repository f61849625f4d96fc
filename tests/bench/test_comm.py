"""`bench.comm`: the columns to the digit, wrong kernels in their rows, and every refusal. No time is asserted."""

import re
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardkit as sk
from shardkit import bench, cost
from shardkit.bench import as_compiled, neighbors, operations
from shardkit.bench.comm import describe_fit, table
from shardkit.bench.fit import Fit
from shardkit.bench.kernels import Compared, case, place
from shardkit.bench.neighbors import share_hidden
from shardkit.bench.operations import DTYPES, OPERATIONS
from shardkit.bench.sweep import sweeps
from shardkit.testing import reference
from support.refusals import refused

ROOT = Path(__file__).parents[2]
QUICK = {"calls": 2, "rounds": 1}
GROUPS = [("all_reduce", (), "{all}"), ("all_reduce", ((0, 1, 2, 3), (4, 5, 6, 7)), "{0-3} {4-7}")]
GROUPS += [("all_reduce", tuple((i, i + 8) for i in range(8)), "{0,8} {1,9} {2,10} {3,11} .. (8)")]
GROUPS += [("all_gather", (tuple(range(0, 64, 4)),), "{0,4,..,60}")]
GROUPS += [("ppermute", ((0, 1), (1, 2), (2, 0)), "0>1>2>0"), ("ppermute", ((2, 1), (1, 0), (3, 3)), "2>1>0")]
GROUPS += [("ppermute", tuple((i, (i + 1) % 16) for i in range(16)), "0>1>2>..>15>0")]


def right(x, axis):
    return lax.psum(x, axis)


def one_element(x, axis):
    return lax.psum(x, axis).at[3].add(1)


def one_device(x, axis):
    y = sk.vary(lax.psum(x, axis), axis)
    return jnp.where(lax.axis_index(axis) == 5, y.at[-1].add(1), y)


def one_size(x, axis):
    y = lax.psum(x, axis)
    return y.at[0].set(0.5) if x.size == 64 else y


def left_out(x, axis):
    y = lax.psum(x, axis)
    return jnp.full_like(y, jnp.nan).at[1:].set(y[1:])


KERNELS = {each.__name__: each for each in (right, one_element, one_device, one_size, left_out)}


@pytest.fixture(scope="module")
def found():
    """The records of kernels of every kind of mistake, beside a right one, in two sizes."""
    return bench.comm(sweeps(sk.make_mesh(data=8), ops=["all_reduce"], kernels=KERNELS, sizes=[64, 256]), **QUICK)


def test_wrong_elements_are_counted_where_they_are(found):
    small, large = ({r["impl"]: r["wrong"] for r in found if r["size"] == size} for size in (64, 256))
    assert small == {"right": 0, "one_element": 8, "one_device": 1, "one_size": 0, "left_out": 8}
    assert large == small | {"one_size": 8}
    firsts = {r["impl"]: r["wrong_first"].split(":")[0] for r in found if r["size"] == 256}
    assert firsts["one_device"] == "device 5 at [63]" and firsts["right"] == ""
    assert next(r["wrong_first"] for r in found if r["impl"] == "left_out").startswith("device 0 at [0]: nan instead")
    assert "\nwrong: one_device, 64 B: device 5 at [15]: " in table(found)


@pytest.fixture(scope="module")
def plane():
    """Rows over one axis of a mesh of two, and over both."""
    mesh = sk.make_mesh(data=2, model=4)
    gathers = {"ops": ["all_gather"], "impls": ["lax", "bidirectional"], "axis": "data", "sizes": [1000, 4096]}
    sums = {"ops": ["all_reduce"], "impls": ["lax", "hierarchical"], "sizes": [4096]}
    records = bench.comm([*sweeps(mesh, **gathers), *sweeps(mesh, **sums)], **QUICK)
    return {(r["impl"], r["op"], r["size"]): r for r in records}


def test_groups_bytes_and_hops_are_those_of_the_axes(plane):
    """Taken out of the loop, a collective would stand here as 0.5 of one; over the other axis, in other groups."""
    assert all(r["wrong"] == 0 for r in plane.values())
    lines = {
        key[:2]: (r["compiled"], r["written_bytes"], r["wire_bytes"], r["hops"])
        for key, r in plane.items()
        if key[2] == 4096
    }
    assert lines == {
        ("lax", "all_gather"): ("all_gather {0,4} {1,5} {2,6} {3,7}", 2048, 2048, 1),
        ("bidirectional", "all_gather"): ("ppermute 0>4>0 1>5>1 2>6>2 3>7>3", 2048, 2048, 1),
        ("lax", "all_reduce"): ("all_reduce {0-7}", 7168, 7168, 14),
        ("hierarchical", "all_reduce"): (
            "reduce_scatter {0-3} {4-7}; all_reduce {0,4} {1,5} {2,6} {3,7}; all_gather {0-3} {4-7}",
            *(7168, 7168, 8),
        ),
    }
    record = plane["lax", "all_gather", 1000]
    assert (record["axes"], record["n"], record["count"], record["redop"]) == ("data", 2, 250, "none")
    assert record["row"] == "all_gather none, 1000 bytes of float32, data of data=2, model=4"


def test_bandwidths_and_expectations_are_their_definitions(plane):  # proves F79
    for (_, op, size), r in plane.items():
        seconds = r["wall_us_median"] / 1e6
        assert r["algbw_GBps"] == size / seconds / 1e9
        assert r["busbw_GBps"] == r["algbw_GBps"] * {"all_gather": 0.5, "all_reduce": 1.75}[op]
        if r["fit"] is not None:
            assert r["fit_us"] == pytest.approx(1e6 * Fit(**r["fit"]).seconds(r["hops"], r["written_bytes"]))
            assert r["of_fit"] == pytest.approx(r["fit_us"] / r["wall_us_median"])
        assert (r["fit"] is None) == (op == "all_reduce") and r["chip_us"] is r["of_chip"] is None
    head = table(list(plane.values())).splitlines()[1]
    columns = "impl size_B count type redop time_us algbw_GB/s busbw_GB/s #wrong sent_B wire_B hops p50 p90 p99 min max"
    columns += " fit_us of_fit as_compiled"
    assert [each.replace(" ", "_") for each in re.split("  +", head)] == columns.split()


def test_the_chips_figures_are_expected_where_the_chip_is_known(monkeypatch, data8):
    monkeypatch.setattr(as_compiled.hardware, "chip_of", lambda kind: cost.chip("v5e"))
    [record] = bench.comm(sweeps(data8, ops=["all_reduce"], impls=["lax"], sizes=[1024]), **QUICK)
    expected = cost.collective_time("all_reduce", 1024, 8, bandwidth=cost.group_bandwidth("v5e"))
    assert record["chip_us"] == pytest.approx(1e6 * expected)
    assert record["of_chip"] == record["chip_us"] / record["wall_us_median"]
    assert record["fit_us"] is record["of_fit"] is record["fit"] is None  # of one size
    assert "  chip us  of chip  fit us" in table([record])


@pytest.mark.check
def test_the_page_shows_the_results_that_are_kept():
    kept = [r for r in bench.read(ROOT / "benchmarks" / "results" / "comm.jsonl") if r["op"] == "all_reduce"]
    assert table(kept) in (ROOT / "docs" / "benchmarks" / "collectives.md").read_text()
    row = kept[2]
    assert (row["wall_us_median"], f"{row['fit_us']:.1f}", f"{row['of_fit']:.2f}") == (334.7322, "442.4", "1.32")


# The definitions of nccl-tests, doc/PERFORMANCE.md; of gather, src/gather.cu
BUS = {
    "all_reduce": lambda n: Fraction(2 * (n - 1), n),
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "gather_to_one"), lambda n: Fraction(n - 1, n)),
    **dict.fromkeys(("broadcast", "shift"), lambda n: Fraction(1)),
}


@pytest.mark.check
@pytest.mark.parametrize("name", OPERATIONS)
def test_bus_factors_to_the_digit(name):
    if name not in BUS:
        assert OPERATIONS[name].bus is None
        return
    for n in range(2, 17):
        assert cost.bus_factor(OPERATIONS[name].bus, n) == float(BUS[name](n))


@pytest.mark.check
@pytest.mark.parametrize("n", [2, 8, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_exact_in_any_order(dtype, n):
    x = operations.make_values(dtype, n, n, 40).astype(np.float64)
    assert (x == np.round(x)).all() and np.abs(x).sum(0).max() <= operations.find_exact_limit(dtype)
    assert (x != x[0]).any(0).sum() > 20 and len(np.unique(x)) > 1
    as_stored = operations.make_values(dtype, n, n, 40)
    assert (np.sum(list(as_stored[::-1]), axis=0).astype(np.float64) == x.sum(0)).all()
    assert not (as_stored == operations.make_poison(dtype)).any()


@pytest.mark.check
@pytest.mark.parametrize("op", OPERATIONS)
def test_every_kernel_returns_what_its_reference_does(op, mesh2x4):
    """Traced only: shapes and dtypes of all implementations, over two axes, with sizes that do not divide by eight."""
    ways = list(OPERATIONS[op].ways)
    [sweep] = sweeps(mesh2x4, ops=[op], impls=ways, sizes=[1028])
    block = operations.make_values("float32", 8, 8, sweep.operation.block(8, sweep.counts[0]))
    options = sweep.operation.arguments(sweep.redop, 8, sweep.counts[0])
    blocks = sweep.operation.reference(list(block), **options)
    x = place(block, mesh2x4, jax.sharding.PartitionSpec(("data", "model")))
    for name, way in sweep.ways.items():
        made = case(
            name,
            lambda x, way=way: way.kernel(x, ("data", "model"), **options),
            x,
            operations.make_poison("float32"),
            np.stack(blocks),
            mesh2x4,
            Compared(np.stack(blocks), 0.0),
        )
        assert np.isnan(made.carry[1]).all()  # what is never written shows


@pytest.mark.deep
@pytest.mark.parametrize("dtype", EVERY := ["float32", "bfloat16", "float16", "int32", "int8", "uint8"])
@pytest.mark.parametrize("op", OPERATIONS)
def test_every_kernel_is_right(op, dtype, mesh2x4):
    """Every reduction, over one axis, both, or three devices, which no dtype divides by: two of these in turn."""
    three = sk.make_mesh(jax.devices()[:3], data=3)
    places = [(mesh2x4, "model"), (mesh2x4, ("data", "model")), (mesh2x4, ("model", "data")), (three, "data")]
    turn = list(OPERATIONS).index(op) + EVERY.index(dtype)
    whole = jnp.issubdtype(jnp.dtype(dtype), jnp.integer)
    for redop in OPERATIONS[op].redops or ("sum",):
        if whole and redop == "mean":
            continue
        for mesh, axis in (places[turn % 4], places[(turn + 1) % 4]):
            for impl in OPERATIONS[op].ways:
                try:
                    how = {"ops": [op], "impls": [impl], "dtypes": [dtype], "redops": [redop], "axis": axis}
                    sweeps(mesh, **how, sizes=[1028])
                except ValueError:
                    continue  # it lacks this
                for record in bench.comm(sweeps(mesh, **how, sizes=[1028]), **QUICK):
                    assert record["wrong"] == 0, (record["row"], impl, record["wrong_first"])


@pytest.mark.check
@pytest.mark.parametrize(("kind", "groups", "text"), GROUPS)
def test_groups_as_text(kind, groups, text):
    assert as_compiled.describe_groups(kind, groups) == text


class Chip:
    """A device of a torus of 4 x 2 chips."""

    device_kind, process_index, platform = "TPU v5 lite", 0, "tpu"

    def __init__(self, i):
        self.id, self.coords = i, (i % 4, i // 4, 0)


class Torus:
    shape, axis_names, size = {"data": 2, "model": 4}, ("data", "model"), 8
    devices = np.array([Chip(i) for i in range(8)]).reshape(2, 4)


@pytest.mark.check
def test_the_physical_dims_of_axes(data8):
    for axes, dims in ((("model",), "x"), (("data",), "y"), (("data", "model"), "x, y")):
        assert as_compiled.describe_dims(Torus, axes) == dims
    assert as_compiled.chip_of(Torus).name == "v5e" and as_compiled.list_places(Torus)[5] == (1, 1, 0)
    assert as_compiled.describe_dims(data8, ("data",)) == "" and as_compiled.chip_of(data8) is None


OPS = "'all_reduce', 'all_gather', 'reduce_scatter', 'all_to_all', 'ragged_all_to_all', 'broadcast', 'shift', "
OPS += "'gather_to_one', 'prefix_scan'"
REFUSED = {
    "--axis must name axes of the mesh, 'data'; got 'model'. Add it to the mesh, as in model=2, or name another.": {
        "axis": "model"
    },
    "--impl of shift must be lax; got ring. Pass for example --impl lax, or a kernel of your own, as in "
    "train.py:kernel.": {"ops": ["shift"], "impls": ["ring"]},
    "--impl of an operation must be lax, ring, bidirectional, hierarchical, two_step, deterministic, leaves, "
    "bucketed, compressed, compressed_bfloat16, compressed_float8_e4m3fn, compressed_float8_e5m2, compressed_int4, "
    "compressed_mxfp8, compressed_mxfp4, compressed_nvfp4, compressed_twice, uneven, compressed_hierarchical or "
    "ragged; got rong. Pass for example --impl lax, or a kernel of your own, as in "
    "train.py:kernel.": {"impls": ["rong"]},
    "--impl hierarchical needs two axes, of slow links and then of fast ones; got --axis data. Write for example "
    "--axis data model.": {"impls": ["hierarchical"]},
    f"op must be {OPS} or 'halo_exchange'; got 'all_redu'. Pass for example op='all_reduce'.": {"ops": ["all_redu"]},
    "a kernel of your own must be compared with a reference, that of its operation; got k.py:mine without --op. "
    "Pass for example --op all_reduce.": {"kernels": {"k.py:mine": right}},
    f"a kernel must have a reference to be compared with; there is none for 'mine', only for {OPS}, "
    "'halo_exchange'. Pass the operation that k.py:mine computes.": {"ops": ["mine"], "kernels": {"k.py:mine": right}},
    "dtype 'float64' needs 64-bit jax, which is off. Set JAX_ENABLE_X64=1.": {"dtypes": ["float64"]},
    "a mean needs a floating-point dtype; got int8. Pass another --redop.": {"dtypes": ["int8"], "redops": ["mean"]},
    "--impl compressed needs a floating-point dtype; got int8. Pass for example --dtype float32.": {
        "impls": ["compressed"],
        "dtypes": ["int8"],
    },
    "--redop of reduce_scatter must be sum or mean; got max. Pass for example --redop sum, or another --op.": {
        "ops": ["reduce_scatter"],
        "redops": ["max"],
    },
    "--redop of all_reduce by ring must be sum or mean; got max. Pass for example --redop sum, or another --impl.": {
        "ops": ["all_reduce"],
        "impls": ["ring"],
        "redops": ["max"],
    },
    "a size must give each of 8 devices an element; got 16 bytes of float32 for all_gather, which takes 32 or "
    "more. Begin --sizes at 32.": {"ops": ["all_gather"], "sizes": [16]},
    "on each device a kernel must return what its reference does, float32[16]; 'k.py:mine' returns float32[8, 16]. "
    "Return float32[16] from it, or name another --op.": {
        "ops": ["all_reduce"],
        "kernels": {"k.py:mine": lax.all_gather},
        "sizes": [64],
    },
    "a kernel for shift must take (x, axis); k.py:mine takes (x). Write def kernel(x, axis, **options), and name "
    "the operation that it computes by --op.": {"ops": ["shift"], "kernels": {"k.py:mine": lambda x: x}},
    "a kernel for all_reduce must take (x, axis, op); k.py:mine takes (x, axis). Write def kernel(x, axis, "
    "**options), and name the operation that it computes by --op.": {
        "ops": ["all_reduce"],
        "redops": ["max"],
        "kernels": {"k.py:mine": lambda x, axis: x},
    },
    "on each device a kernel must return what its reference does, float32[16]; 'k.py:mine' returns tuple. Return "
    "float32[16] from it, or name another --op.": {
        "ops": ["all_reduce"],
        "kernels": {"k.py:mine": lambda x, axis: (x, x)},
        "sizes": [64],
    },
}


NEIGHBORS = ["data", "compute", "late"]
BESIDE_REFUSED = {
    "beside must be 'compute', 'late' or 'data'; got 'matmul'. Pass for example beside='compute'.": {
        "beside": ["matmul"]
    },
    "--beside must name an axis that the collective is not over; got model, of a collective over model. Name one of "
    "the others by --axis.": {"beside": ["model"]},
}


@pytest.mark.check
@pytest.mark.parametrize("message, options", BESIDE_REFUSED.items())
def test_refusals_of_neighbors(message, options, mesh2x4):
    assert refused(lambda: sweeps(mesh2x4, axis="model", **options)) == f"bench comm: {message}"


@pytest.mark.check
def test_an_axis_named_as_a_neighbor_is_refused():
    message = (
        "bench comm: --beside late is no axis, so that no axis of the mesh may have this name; got a mesh late=2, "
        "model=4. Give the axis another name."
    )
    assert refused(lambda: sweeps(sk.make_mesh(late=2, model=4), axis="model", beside=["late"])) == message


@pytest.fixture(scope="module")
def crowded():
    """The records of a right kernel and of a wrong one, alone and beside each neighbor."""
    kernels = {"right": right, "one_size": one_size}
    rows = sweeps(sk.make_mesh(data=2, model=4), ops=["all_reduce"], kernels=kernels, sizes=[256], axis="model")
    [sweep] = rows
    return bench.comm([sweep._replace(beside=tuple(NEIGHBORS))], **QUICK)


def test_a_neighbor_runs_in_the_same_program_and_hides_no_mistake(crowded):
    """The bytes of a row are those of both: without the neighbor, or out of the loop, they would be others."""
    right_rows = {record["beside"]: record for record in crowded if record["impl"] == "right"}
    assert list(right_rows) == ["", *NEIGHBORS]
    over_model, over_data = 2 * 256 * 3 / 4, 2 * 256 / 2
    bytes_of_rows = {name: (record["written_bytes"], record["wire_bytes"]) for name, record in right_rows.items()}
    alone = (over_model, over_model)
    together = (over_model + over_data,) * 2
    assert bytes_of_rows == {"": alone, "data": together, "compute": alone, "late": alone}
    assert right_rows["data"]["compiled"].count("all_reduce") == 2
    wrong = {(record["impl"], record["beside"]): record["wrong"] for record in crowded}
    for name in ("", *NEIGHBORS):
        assert wrong["right", name] == 0
        assert wrong["one_size", name] == 8  # one element of each device


def test_hidden_is_a_share_of_the_shorter_time(crowded):
    assert share_hidden(10.0, 4.0, 10.0) == 1 and share_hidden(10.0, 4.0, 14.0) == 0 and share_hidden(2, 4, 8) == -1
    for record in crowded:
        times = (record["alone_us"], record["neighbor_us"], record["wall_us_median"])
        if not record["beside"]:
            assert times[:2] == (None, None) and record["hidden"] is None
        else:
            assert record["hidden"] == pytest.approx(share_hidden(*times), abs=1e-3)  # of a single round
    text = table(crowded).split("\n")
    assert len([line for line in text if re.match("right +(data|compute|late) ", line)]) == 3
    assert "wrong: one_size beside late, 256 B: " in table(crowded)


def test_a_row_beside_a_neighbor_is_no_measurement_of_links(crowded):
    """A fit of a collective that shares its links would be of slower ones."""
    rows = []
    for record in crowded:
        for sent in (1e3, 1e6):
            time = sent / 1e3 * (3 if record["beside"] else 1)  # alone it sends 1 GB/s
            rows.append(record | {"impl": "lax", "wrong": 0, "written_bytes": sent, "wall_us_median": time})
    assert bench.links(rows).of("model").bandwidth == pytest.approx(1e9)


def test_a_neighbor_takes_about_as_long_as_the_collective(monkeypatch, mesh2x4):
    """Twice the side is eight times the compute."""
    [sweep] = sweeps(mesh2x4, ops=["all_reduce"], sizes=[1024], axis="model")
    times = {"alone": 800.0, "matmul": 100.0}
    monkeypatch.setattr(neighbors, "measure", lambda *_, **__: [{"wall_us_min": time} for time in times.values()])
    late = neighbors.make_neighbor("late", sweep, 256, None, 1)
    assert late.x.shape == (8, 512**2) and late.comes_first
    times["alone"] = 0.001  # a matmul has at least one tile of the matrix unit
    assert neighbors.make_neighbor("compute", sweep, 256, None, 1).x.shape == (8, 128**2)


def test_the_first_device_of_each_group_is_late(mesh2x4):
    """Only its block is multiplied: ones become the number of rows."""
    matmul = neighbors._Matmul(4, jnp.float32)
    run = jax.shard_map(
        lambda block: matmul.run_late(("model",), block[0])[None],
        mesh=mesh2x4,
        in_specs=jax.sharding.PartitionSpec(("data", "model")),
        out_specs=jax.sharding.PartitionSpec(("data", "model")),
    )
    assert run(jnp.ones((8, 16)))[:, 0].tolist() == [4, 1, 1, 1, 4, 1, 1, 1]


def test_rows_by_zipf():
    """Worked by hand in `share_by_zipf`; the first device receives most, and the others' results end with zeros."""
    assert operations.share_by_zipf(12, 4).tolist() == [8, 2, 1, 1]
    assert operations.share_by_zipf(5, 1).tolist() == [5]
    blocks = [np.arange(12) + 100 * device for device in range(4)]
    results = OPERATIONS["ragged_all_to_all"].reference(blocks)
    assert [len(result) for result in results] == [32] * 4
    assert results[1][:8].tolist() == [8, 9, 108, 109, 208, 209, 308, 309] and not results[1][8:].any()
    assert results[3][:4].tolist() == [11, 111, 211, 311]


@pytest.mark.check
@pytest.mark.parametrize("said, given", REFUSED.items())
def test_refusals(given, said, data8):
    assert refused(lambda: bench.comm(sweeps(data8, **given))) == f"bench comm: {said}"


@pytest.mark.check
def test_what_is_not_named_is_left_out(data8):
    """Of the defaults, an operation has what it has; of what is named, every name is somewhere."""
    of = {each.operation.name: list(each.ways) for each in sweeps(data8)}
    assert list(of) == list(OPERATIONS)
    assert of["reduce_scatter"] == ["lax", "ring"] and of["shift"] == ["lax"]
    assert [each.operation.name for each in sweeps(data8, impls=["two_step", "uneven"])] == [
        *("all_reduce", "all_gather", "reduce_scatter")
    ]
    assert {each.operation.name for each in sweeps(data8, redops=["max"])} >= {"all_gather", "prefix_scan"}
    [sweep] = sweeps(data8, ops=["sendrecv"], sizes=[1000, 1001], dtypes=["float32"])
    assert sweep.operation.name == "shift" and sweep.counts == (250,)
    assert reference.shift is sweep.operation.reference


@pytest.mark.check
def test_a_fit_of_two_sizes_says_so():
    """A line meets two points exactly, which is no proof of it."""
    fit = Fit(1e-6, 1e9, 0.0)
    assert describe_fit(fit, 2) == "1 us a hop, 1 GB/s, from two sizes only"
    assert describe_fit(fit._replace(residual=0.125), 3) == "1 us a hop, 1 GB/s, within 12%"
