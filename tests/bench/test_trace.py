"""Execution traces: their nodes against the census, their dependencies by hand, and their bytes decoded again."""

import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import bench
from shardkit.cli.bench.trace import Options, trace
from support.refusals import refused

pytestmark = pytest.mark.check
MESH = sk.abstract_mesh(data=2, model=4)


WHOLE = P()


def mapped(function, in_specs=WHOLE, out_specs=WHOLE):
    return jax.shard_map(function, mesh=MESH, in_specs=in_specs, out_specs=out_specs)


def chained(x):
    """Two layers: a product, then its sum over the model; then a sum of both over data, which waits for the second."""
    for _ in range(2):
        x = sk.all_reduce(x @ x, "model")
    return sk.all_reduce(x, "data")


X = np.ones((8, 8), np.float32)


# Of the values of attributes, by the types that Chakra's feeder reads: int32, int64, uint64, bool, string.
FIELDS = dict.fromkeys(("comm_src", "comm_dst", "comm_tag"), 7) | dict.fromkeys(
    ("num_ops", "comm_type", "comm_size"), 9
)
FIELDS |= {"tensor_size": 13, "is_cpu_op": 27, "pg_name": 29}
OTHER = sk.abstract_mesh(data=8)


def varint(data, at):
    """The number that begins there, of seven bits a byte, and where it ends."""
    value = shift = 0
    while data[at] > 127:
        value, shift, at = value | (data[at] & 127) << shift, shift + 7, at + 1
    return value | data[at] << shift, at + 1


def decoded(data):
    """The fields of a protocol buffer: (number, value), values of length-delimited fields as bytes."""
    at, out = 0, []
    while at < len(data):
        key, at = varint(data, at)
        value, at = varint(data, at)
        if key & 7 == 2:
            value, at = data[at : at + value], at + value
        out.append((key >> 3, value))
    return out


def messages(file):
    """The version of a trace, and its nodes as dicts; each message has its length before it."""
    data, at, out = file.read_bytes(), 0, []
    while at < len(data):
        size, at = varint(data, at)
        out.append(decoded(data[at : at + size]))
        at += size
    return dict(out[0])[1], [node_of(fields) for fields in out[1:]]


def node_of(fields):
    node = {"deps": []}
    for number, value in fields:
        if number == 5:
            node["deps"] = list(value)  # small numbers are a byte each
        elif number == 10:
            (_, name), (field, given) = decoded(value)
            assert field == FIELDS[name.decode()]
            node[name.decode()] = given
        else:
            node[{1: "id", 2: "name", 3: "type", 7: "micros"}[number]] = value
    return node


def test_nodes_are_the_collectives_of_the_census_with_loops_unrolled():
    """It alone finds a loop that is not unrolled, or a collective that is forgotten."""

    def layer(x, w):
        return sk.all_reduce(x @ sk.all_gather(w, "model"), "data"), None

    f = mapped(lambda w, x: lax.scan(layer, sk.vary(x, "model"), w)[0], (P(None, "model"), P()), P(None, "model"))
    w, x = jax.ShapeDtypeStruct((5, 16, 16), jnp.float32), jax.ShapeDtypeStruct((8, 16), jnp.float32)
    found, census = bench.execution_trace(f, w, x), sk.census(f, w, x)
    for kind in ("all_gather", "all_reduce"):
        nodes = [node for node in found.nodes if node.kind == kind]
        [row] = census.select(kind=kind)
        assert len(nodes) == row.count == 5 and {node.bytes for node in nodes} == {row.bytes_in}
    compute = [node for node in found.nodes if not node.kind]
    assert sum(node.flops for node in compute) == 5 * 2 * 8 * 16 * 16
    assert sum(node.bytes for node in compute) == 5 * 4 * (8 * 16 + 16 * 16 + 8 * 16)


def test_compute_waits_for_a_collective_where_its_result_is_used():
    """By hand: an unused gather is waited for by nobody; what is sent early overlaps the product after it."""

    def overlapping(x):
        early = sk.all_gather(x, "data")  # 0
        y = x @ x  # 1, without waiting
        late = sk.all_reduce(y, "model")  # 2, after 1
        return early @ jnp.concatenate([late, late]).T  # 3, after 0, 1 and 2

    nodes = bench.execution_trace(mapped(overlapping, P(), P("data")), X).nodes
    assert [(node.id, node.kind, node.deps) for node in nodes] == [
        (0, "all_gather", ()),
        (1, "", ()),
        (2, "all_reduce", (1,)),
        (3, "", (0, 1, 2)),
    ]


def test_a_product_outside_of_shard_map_is_shared_by_the_devices():
    inside = mapped(lambda x: sk.all_reduce(x, "data"), P("data"), P())
    nodes = bench.execution_trace(lambda x: (y := inside(x)) @ y.T, X).nodes
    assert nodes[-1].flops == 2 * 4 * 4 * 8 // 8 and nodes[-1].deps == (0,)


def test_the_files_say_what_the_nodes_do(tmp_path):
    """It alone finds bytes that no reader of Chakra's format understands, and groups of the wrong devices."""
    found = bench.execution_trace(mapped(chained), X, chip="v5e")
    *files, groups = found.write(tmp_path / "new")
    assert [file.name for file in files] == [f"trace.{rank}.et" for rank in range(8)]
    named = json.loads(groups.read_text())
    assert list(named.values()) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 4], [1, 5], [2, 6], [3, 7]]
    version, nodes = messages(files[6])
    assert version == b"1.0.0"
    assert [(n["id"], n["type"], n["name"], n["deps"]) for n in nodes] == [
        (0, 4, b"compute", []),
        (2, 7, b"all_reduce over model", [0]),
        (4, 4, b"compute", [0, 2]),
        (6, 7, b"all_reduce over model", [4]),
        (8, 7, b"all_reduce over data", [6]),
    ]
    assert (nodes[0]["num_ops"], nodes[0]["tensor_size"], nodes[0]["micros"]) == (2 * 8**3, 3 * 256, 1)
    assert [nodes[k]["comm_size"] for k in (1, 3, 4)] == [256] * 3 and nodes[1]["comm_type"] == 0
    assert named[nodes[1]["pg_name"].decode()] == [4, 5, 6, 7] and named[nodes[4]["pg_name"].decode()] == [2, 6]
    assert all(n["is_cpu_op"] == 0 for n in nodes)


def test_a_permutation_is_sends_and_receives(tmp_path):
    """It alone finds a send without its receive: the tags and ends of both are the same."""
    f = mapped(lambda x: sk.shift(x, "model", wrap=False) @ x, P(None, "model"), P(None, "model"))
    found = bench.execution_trace(f, np.ones((2, 8), np.float32))
    *files, _ = found.write(tmp_path)
    ends = {5: [], 6: []}
    for rank, file in enumerate(files):
        _, nodes = messages(file)
        for node in nodes:
            if node["type"] in ends:
                ends[node["type"]].append((node["comm_src"], node["comm_dst"], node["comm_tag"], node["comm_size"]))
                assert rank == node["comm_src" if node["type"] == 5 else "comm_dst"]
    assert sorted(ends[5]) == sorted(ends[6])
    assert [end[:2] for end in sorted(ends[5])] == [(0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7)]
    [first], [last] = ([n for n in messages(files[k])[1] if n["type"] == 4] for k in (0, 3))
    assert first["deps"] == [] and last["deps"] == [0]  # the first device receives nothing


def make():
    return mapped(chained), X


def test_the_command_writes_and_counts(tmp_path, capsys):
    assert trace(Options(f"{__file__}:make", tmp_path / "out")) == 0
    assert capsys.readouterr().out.splitlines() == [
        "     2 x compute, 1,536 bytes",
        "     2 x all_reduce over model, 512 bytes",
        "     1 x all_reduce over data, 256 bytes",
        "5 nodes, 2,048 FLOPs per device",
        f"wrote {tmp_path / 'out' / 'trace.0.et'} to trace.7.et, and groups.json",
    ]


def over_two(x):
    return jax.shard_map(jnp.sin, mesh=OTHER, in_specs=P(), out_specs=P())(mapped(jnp.cos)(x))


@pytest.mark.parametrize(
    "message, function",
    {
        "trace: the step must have a shard_map, whose mesh has the devices; it has none. Pass a step of "
        "make_train_step, or a function that calls jax.shard_map.": jnp.sin,
        "trace: a step must use one mesh; it uses data=2, model=4 and data=8. Trace the parts by themselves.": over_two,
        "trace: a collective must use whole axes; all_gather over model has axis_index_groups. Make the groups an "
        "axis of the mesh.": mapped(
            lambda x: lax.all_gather(x, "model", axis_index_groups=[[0, 1], [2, 3]]), P(), P("model")
        ),
    }.items(),
)
def test_what_cannot_be_traced_is_refused(function, message):
    assert refused(lambda: bench.execution_trace(function, X)) == message


def test_too_many_nodes_are_refused(monkeypatch):
    monkeypatch.setattr(importlib.import_module("shardkit.bench.trace"), "_MOST", 4)
    assert refused(lambda: bench.execution_trace(mapped(chained), X)) == (
        "trace: a step must have at most 4 nodes, with its loops unrolled; it has more. Trace fewer layers or "
        "microbatches."
    )
