"""Tables: what they send, what is refused, what they compute, how long they take on links, and as plans of MSCCL++."""

import json
import random
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import tables
from shardkit.analysis import census
from shardkit.collectives.tables.messages import find_matchings
from support.refusals import raises, refused, value_error
from support.tiers import DEEP

OPS = ("all_gather", "reduce_scatter", "all_reduce")


def log2(n):
    return (n - 1).bit_length()


def is_power(n):
    return n & (n - 1) == 0


# Steps of an all_gather over n devices.
STEPS = {
    "ring": (tables.ring, lambda n: n - 1),
    "both ways": (partial(tables.ring, bidirectional=True), lambda n: n // 2),
    "bruck": (tables.bruck, log2),
    "pat": (tables.pat, log2),
    "halving": (tables.halving, log2),
    "bine": (tables.bine, log2),
    "torus": (lambda op, n: tables.torus(op, (2, 1, n // 2), bidirectional=True), lambda n: 2 * (n // 2 - 1)),
}


def fits(name, n):
    return {"halving": is_power(n), "bine": is_power(n), "torus": n % 2 == 0 and n > 4}.get(name, True)


def size_on_a_device(op, n):
    return 48 if op == "all_gather" else 48 * n


# proves N45 in part: steps and bytes are the closed forms, and each contribution is there exactly once
@pytest.mark.parametrize("name", STEPS)
def test_steps_and_bytes(name):
    build, steps = STEPS[name]
    for n in range(1, 65) if DEEP else (*range(1, 18), 32, 63, 64):
        if not fits(name, n):
            continue
        for op in OPS:
            table = build(op, n)
            table.check()
            assert table.steps == steps(n) * (2 if op == "all_reduce" else 1), (op, n)
            size = size_on_a_device(op, n)
            assert table.traffic(size).sent == sk.cost.wire(op, size, n).sent, (op, n)


@pytest.mark.parametrize(
    ("n", "inner", "chunks"), [(n, i, c) for n in (1, 2, 6, 16, 30) for i in (1, 2) if n % i == 0 for c in (1, 2, 5)]
)
def test_trees(n, inner, chunks):
    table = tables.tree(n, inner=inner, chunks=chunks)
    table.check()
    assert table.steps <= 4 * log2(n // inner) + 2 * inner + 2 * chunks
    assert len(table.sends) == 2 * (n - 1) * chunks  # up and down each edge
    machines = {(s.source // inner, s.target // inner) for s in table.sends}
    assert sum(a != b for a, b in machines) <= 4 * (n // inner - 1), "two trees of machines"


def test_pat_limits_what_a_message_holds():
    for n, most in ((13, 1), (13, 4), (16, 2), (64, 8)):
        table = tables.pat("all_gather", n, aggregate=most)
        table.check()
        assert max(message.chunks for step in table.by_step for message in step) <= most


def by_hand(table, value):
    """The chunks of all devices after a table, [devices, chunks], by a plain loop over its messages."""
    for step in range(table.steps):
        before = value.copy()
        now = [s for s in table.sends if s.step == step]
        for s in now:
            if table.op == "reduce_scatter":
                value[s.source, s.chunk] = 0
        for s in now:
            new = before[s.source, s.chunk]
            value[s.target, s.chunk] = value[s.target, s.chunk] + new if s.reduce else new
    return value


def is_right(table):
    """Whether powers of the number of contributions come out as they should."""
    n, chunks = table.devices, table.chunks
    own = np.array([[(n + 1) ** d] * chunks for d in range(n)], object)
    owner = np.arange(chunks) * n // chunks
    if table.op == "all_gather":
        after = by_hand(table, np.where(owner == np.arange(n)[:, None], own, 0))
        return bool((after == [own[d, 0] for d in owner]).all())
    after = by_hand(table, own)
    total = sum((n + 1) ** d for d in range(n))
    if table.op == "reduce_scatter":
        return all(after[owner[chunk], chunk] == total for chunk in range(chunks))
    return bool((after == total).all())


def corrupted(table, draw):
    """A table with one message changed, left out, repeated, or two that change places."""
    sends, at = list(table.sends), draw.randrange(len(table.sends))
    what = draw.choice(["drop", "repeat", "source", "target", "chunk", "reduce", "step", "swap"])
    if what == "drop":
        del sends[at]
    elif what == "repeat":
        sends.append(sends[at]._replace(step=draw.randrange(table.steps)))
    elif what == "swap":
        other = draw.randrange(len(sends))
        sends[at], sends[other] = (
            sends[at]._replace(chunk=sends[other].chunk),
            sends[other]._replace(chunk=sends[at].chunk),
        )
    else:
        new = {
            "chunk": draw.randrange(table.chunks),
            "reduce": not sends[at].reduce,
            "step": draw.randrange(table.steps),
        }
        sends[at] = sends[at]._replace(**{what: new.get(what, draw.randrange(table.devices))})
    return tables.SendTable(table.op, table.devices, table.chunks, tuple(sorted(sends)), "corrupted")


# Catches a rule of `check` that is missing: every wrong table is refused, and of the others only those that waste.
def test_thousands_of_corruptions():
    draw, wrong, wasteful, enough = random.Random(0), 0, 0, 9000 if DEEP else 2000
    some = (
        [tables.ring(op, 4) for op in OPS] + [tables.bruck(op, 5) for op in OPS] + [tables.tree(6, inner=2, chunks=2)]
    )
    while wrong < enough:
        table = corrupted(some[(wrong + wasteful) % len(some)], draw)
        try:
            table.check()
        except ValueError as error:
            wasteful += is_right(table)
            wrong += not is_right(table)
            assert "got" in str(error) and str(error).endswith(".")
        else:
            assert is_right(table), table
    assert wasteful < wrong / 5


REFUSED = {
    "mine: a message must send what its source has; got nothing, of chunk 0 from device 1 to 0 in step 0. Send it "
    "later, or once.": ("all_gather", 2, [(0, 1, 0, 0, False)]),
    "mine: a message of an all_gather must copy; got one that adds, of chunk 0 from device 0 to 1 in step 0. Pass "
    "reduce=False.": ("all_gather", 2, [(0, 0, 1, 0, True)]),
    "mine: a message of a reduce_scatter must add; got one that copies, of chunk 1 from device 0 to 1 in step 0. Pass "
    "reduce=True.": ("reduce_scatter", 2, [(0, 0, 1, 1, False)]),
    "mine: a message must leave a chunk with its owner; got one from the owner, of chunk 0 from device 0 to 1 in step "
    "0. Leave it out.": ("reduce_scatter", 2, [(0, 0, 1, 0, True)]),
    "mine: a message must add each contribution once; got device 0 twice, of chunk 0 from device 0 to 1 in step 1. "
    "Leave it out.": ("all_reduce", 1, [(0, 0, 1, 0, True), (1, 0, 1, 0, True)]),
    "mine: a message must bring what is missing; got nothing new, of chunk 1 from device 0 to 1 in step 1. Leave it "
    "out.": ("all_gather", 2, [(0, 1, 0, 1, False), (1, 0, 1, 1, False)]),
    "mine: device 1 must have what every device has of chunk 0 in the end; got nothing of device 0. Add a message that "
    "brings it.": ("all_gather", 2, [(0, 1, 0, 1, False)]),
    "mine: a message must go from one of 2 devices to another, with one of 2 chunks, after those before it; got "
    "another, of chunk 5 from device 0 to 1 in step 0. Pass numbers in range, in the order of steps, none left out.": (
        "all_gather",
        2,
        [(0, 0, 1, 5, False)],
    ),
    "mine: the chunks of an all_gather must be a multiple of its devices; got 3 chunks for 2 devices. Pass for example "
    "2.": ("all_gather", 3, []),
    "mine: a message that copies must be alone at its place; got another, of chunk 0 from device 0 to 1 in step 0. "
    "Send one a step later.": ("all_reduce", 1, [(0, 0, 1, 0, False), (0, 0, 1, 0, True)]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message):
    op, chunks, sends = REFUSED[message]
    with value_error(message):
        tables.SendTable(op, 2, chunks, tuple(tables.Send(*each) for each in sends), "mine").check()


# Catches replicas whose last bits differ: device 0 has (0 + 1) + 2, the others (0 + 2) + 1.
def test_all_devices_add_in_one_order():
    sends = [(0, 0, 2, 0, True), (0, 1, 0, 0, True), (0, 2, 0, 0, True), (1, 2, 1, 0, True), (2, 1, 2, 0, False)]
    message = (
        "mine: all devices must add chunk 0 in one order, to have the same bits; got another on device 1 than on "
        "device 0. Send the sum of one of them."
    )
    with value_error(message):
        tables.SendTable("all_reduce", 3, 1, tuple(tables.Send(*each) for each in sends), "mine").check()
    sends[-1:] = [(2, 1, 0, 0, True), (2, 1, 2, 0, False)]
    with pytest.raises(ValueError, match="must add each contribution once; got devices 0, 1, 2 twice"):
        tables.SendTable("all_reduce", 3, 1, tuple(tables.Send(*each) for each in sends), "mine").check()


def test_ppermutes_are_as_few_as_the_busiest_device_has_messages():
    draw = random.Random(0)
    for _ in range(200):
        n = draw.randrange(2, 9)
        pairs = [pair for pair in product(range(n), repeat=2) if pair[0] != pair[1] and draw.random() < 0.4]
        parts = find_matchings(pairs, n)
        assert sorted(pair for part in parts for pair in part) == sorted(pairs)
        for part in parts:
            assert len({a for a, _ in part}) == len({b for _, b in part}) == len(part)
        busiest = max((sum(pair[end] == d for pair in pairs) for d in range(n) for end in (0, 1)), default=0)
        assert len(parts) == busiest


EXECUTED = {
    "ring of 8": (8, partial(tables.ring)),
    "both ways of 6": (6, partial(tables.ring, bidirectional=True)),
    "bruck of 3": (3, tables.bruck),
    "pat of 8 in pairs": (8, partial(tables.pat, aggregate=2)),
    "bine of 8": (8, tables.bine),
    "halving of 1": (1, tables.halving),
    "torus of 2 x 3, padded": (6, lambda op, n: tables.torus(op, (2, 3), bidirectional=True)),
    "tree of 8, padded": (8, lambda op, n: tables.tree(n, inner=2, chunks=3) if op == OPS[2] else tables.ring(op, n)),
}


def kernels(build, n, axis):
    """All three collectives by tables, their means, and what they become in a derivative."""
    made = {op: build and build(op, n) for op in OPS}

    def kernel(x_bD):
        gather = partial(sk.all_gather, axis=axis, dim=1, table=made["all_gather"])
        scatter = partial(sk.reduce_scatter, axis=axis, dim=1, table=made["reduce_scatter"])
        scale = (
            jnp.arange(x_bD.size * n, dtype=jnp.float32).reshape(x_bD.shape[0], -1)
            % 7
            * (1.0 + sk.axis_index(axis).astype(jnp.float32))
        )
        total = sk.all_reduce({"x": x_bD, "b": x_bD > 0}, axis, op="mean", table=made["all_reduce"])
        wide = jnp.tile(x_bD, n)
        results = [
            gather(x_bD),
            scatter(wide),
            scatter(wide, op="mean"),
            jax.grad(lambda x: jnp.sum(gather(x) * scale))(x_bD),
            jax.grad(lambda x: jnp.sum(scatter(x) * scale[:, : x_bD.shape[1]]))(wide),
            jax.grad(lambda x: jnp.sum(gather(x, replicated=True) * 2))(x_bD),
        ]
        back = jax.grad(lambda x: jnp.sum(sk.all_reduce(x, axis, table=made["all_reduce"]) * 3))(x_bD)
        return [sk.vary(y, axis)[None] for y in (*results, back)], total

    return kernel


# proves N45 in part: values and derivatives are those of jax's collectives, bit for bit, and the census is the traffic
@pytest.mark.quick("both ways of 6", "bruck of 3", "halving of 1", "tree of 8, padded")
@pytest.mark.parametrize("name", EXECUTED)
def test_executed(name):
    n, build = EXECUTED[name]
    sizes = {"a": 2, "b": n // 2} if n % 2 == 0 else {"a": n}
    axis = tuple(reversed(sizes))
    mesh = sk.make_mesh(jax.devices()[:n], **sizes)
    x = np.random.default_rng(0).integers(-4, 5, (3, 5 * n)).astype(np.float32)
    layouts = {"in_specs": P(None, axis), "out_specs": (P(axis), P())}
    runs = [jax.jit(jax.shard_map(kernels(each, n, axis), mesh=mesh, **layouts))(x) for each in (build, None)]
    emulated = sk.testing.emulate(kernels(build, n, axis), sizes, **layouts)(x)
    for ours, jaxs, vmaps in zip(*map(jax.tree.leaves, (*runs, emulated)), strict=True):
        assert np.array_equal(ours, jaxs) and np.array_equal(ours, vmaps)
    for op in OPS:
        table, kernel = build(op, n), getattr(sk, op)
        options = {} if op == "all_reduce" else {"dim": 1}

        def alone(x, kernel=kernel, table=table, options=options):
            return sk.vary(kernel(x, axis, table=table, **options), axis)[None]

        piece = np.zeros((3, 60 * n), np.float32)
        found = census(jax.shard_map(alone, mesh=mesh, in_specs=P(None, axis), out_specs=P(axis)), np.tile(piece, n))
        assert sum(row.total for row in found.rows) == table.traffic(piece.nbytes).sent


# proves N49 in part: for all inputs, not for some
def test_for_all_inputs():
    table = tables.torus("all_reduce", (2, 2), bidirectional=True)
    sk.testing.assert_equal_for_all_inputs(
        lambda x: sk.all_reduce(x, "a", table=table),
        lambda x: x.reshape(4, 3).sum(0),
        mesh=sk.abstract_mesh(a=4),
        in_specs=P("a"),
        out_specs=P(),
        args=(np.zeros(12, np.float32),),
    )


# Catches a gradient n times too large where no type says what varies, and a shape of no elements.
def test_without_vma_and_empty():
    mesh = sk.make_mesh(jax.devices()[:8], a=8)
    for gather in (partial(sk.all_gather, table=tables.ring("all_gather", 8)), sk.ring.all_gather):
        found = jax.grad(lambda x, gather=gather: jnp.sum(gather(x, "a", replicated=True) * 2.0))
        layouts = {"in_specs": P("a"), "out_specs": P("a"), "check_vma": False}
        assert (jax.jit(jax.shard_map(found, mesh=mesh, **layouts))(np.ones(8, np.float32)) == 2).all()
        whole = jax.shard_map(lambda x, gather=gather: gather(x, "a", dim=1), mesh=mesh, in_specs=P(), out_specs=P("a"))
        assert jax.eval_shape(whole, np.zeros((0, 2))).shape == (0, 16)


RING = tables.ring("all_reduce", 4)
WRONG_USES = {
    "all_reduce: table must be an all_reduce over the 8 devices of axis 'a'; got ring, an all_reduce over 4 devices of "
    "4 chunks in 6 steps. Make one for them.": lambda x: sk.all_reduce(x, "a", table=RING),
    "all_gather: table must be an all_gather over the 8 devices of axis 'a'; got ring, an all_reduce over 8 devices of "
    "8 chunks in 14 steps. Make one for them.": lambda x: sk.all_gather(x, "a", table=tables.ring("all_reduce", 8)),
    "all_reduce: a table adds in its own order, so it needs op 'sum' or 'mean' without deterministic; got op='max', "
    "deterministic=False. Leave table out.": lambda x: sk.all_reduce(x, "a", op="max", table=RING),
    "ring: a table lists all messages of an all_gather, at most 4,194,304; got 999,999,999,000,000,000. Pass fewer "
    "devices or chunks.": lambda x: tables.ring("all_gather", 10**9),  # it took 19 GB
    "tree: a table lists all messages of an all_gather, at most 4,194,304; got 14,000,000. Pass fewer devices or "
    "chunks.": lambda x: tables.tree(8, chunks=10**6),
    "torus: a table lists all messages of an all_gather, at most 4,194,304; got 33,546,240. Pass fewer devices or "
    "chunks.": lambda x: tables.torus("all_gather", (64, 64)),
    "halving: devices must be a power of two; got 6. Pass 4, or use bruck.": lambda x: tables.halving("all_gather", 6),
    "pat: aggregate must be a power of two of at most 4, half of 6 devices rounded up; got 3. Pass 4, or None.": (
        lambda x: tables.pat("all_gather", 6, aggregate=3)
    ),
    "tree: inner must divide the devices; got 4 for 6 devices. Pass the devices of a machine.": (
        lambda x: tables.tree(6, inner=4)
    ),
    "ring: an all_reduce has no transpose as a table, because its derivative sends nothing; got op='all_reduce'. "
    "Transpose the reduce_scatter or the all_gather that it is made of.": lambda x: RING.transpose(),
    "SendTable.then: a reduce_scatter must go before an all_gather of as many devices and chunks; got all_reduce over "
    "4 devices of 4 chunks in 6 steps before all_reduce over 4 devices of 4 chunks in 6 steps. Pass the transpose of "
    "one of them.": lambda x: RING.then(RING),
    "SendTable.simulate: links must lead from every device to every other; got none from device 0 to device 2. Add a "
    "link.": lambda x: RING.simulate({(0, 1): 1.0, (1, 0): 1.0, (2, 0): 1.0}, 1),
    "SendTable.simulate: links must be from one of 4 devices to another; got (0, 4). Pass a mapping of (source, "
    "target) to bytes/s, as torus_links returns.": lambda x: RING.simulate({(0, 4): 1.0}, 1),
}


@pytest.mark.parametrize("message", WRONG_USES)
def test_errors(message):
    mesh = sk.abstract_mesh(a=8)

    def trace():
        jax.eval_shape(
            jax.shard_map(lambda x: sk.vary(WRONG_USES[message](x), "a"), mesh=mesh, in_specs=P("a"), out_specs=P("a")),
            np.zeros(64),
        )

    assert refused(trace) == message


def test_time_on_links():
    links = tables.torus_links((8,), bandwidth=2.0)
    ring = tables.ring("all_gather", 8).simulate(links, 6, latency=0.5)
    assert ring.seconds == 7 * (0.5 + 6 / 2) and ring.busiest == (6.0,) * 7
    bruck = tables.bruck("all_gather", 8).simulate(links, 6, latency=0.5)
    # 1, 2 and 4 chunks over 1, 2 and 4 links; the longest way has two directions, each with half
    assert bruck.busiest == (6.0, 24.0, 48.0) and bruck.seconds == 0.5 * 7 + (6 + 24 + 48) / 2
    assert tables.torus_links((2, 2)) == dict.fromkeys(
        [(a, b) for a, b in product(range(4), repeat=2) if a + b != 3 and a != b], 1.0
    )


PLANS = [
    *(build(op, 8) for build in (tables.ring, tables.halving, tables.bine, tables.bruck) for op in OPS),
    tables.ring("all_reduce", 5, bidirectional=True),
    tables.ring("all_gather", 1),
]


# proves N45 in part: what is written as a plan of MSCCL++ is read as the same table, by an interpreter of its programs
@pytest.mark.parametrize("table", PLANS, ids=str)
def test_a_plan_of_mscclpp_and_back(table):
    text = tables.to_mscclpp(table)
    assert tables.from_mscclpp(text) == table
    plan = json.loads(text)
    for rank, gpu in enumerate(plan["gpus"]):  # what its reader requires, and does not check
        assert gpu["id"] == rank and min(gpu["input_chunks"], gpu["output_chunks"]) > 0
        assert gpu.keys() >= {"scratch_chunks", "channels", "remote_buffers"}
        assert all(len(block["ops"]) <= 64 and block["id"] == at for at, block in enumerate(gpu["threadblocks"]))
    tree = tables.tree(8, chunks=4)
    read = tables.from_mscclpp(tables.to_mscclpp(tree))
    assert sorted(s[1:] for s in read.sends) == sorted(s[1:] for s in tree.sends) and read.steps <= tree.steps


# Catches a crash, and a plan that is read as something else: left out signals, changed numbers, other types.
def test_plans_that_are_wrong():
    draw, texts = random.Random(0), [tables.to_mscclpp(tables.ring(op, 3)) for op in OPS]
    refusals = 0
    for number in range(600):
        plan = json.loads(texts[number % 3])
        node = plan
        while isinstance(node, dict | list) and node:
            key = draw.choice(sorted(node) if isinstance(node, dict) else range(len(node)))
            parent, node = node, node[key]
            if draw.random() < 0.2:
                break
        if draw.random() < 0.4:
            del parent[key]
        else:
            parent[key] = draw.choice([0, 1, -1, 7, True, 10**30, None, "put", [], {}, [[]], 0.5])
        try:
            tables.from_mscclpp(json.dumps(plan)).check()
        except ValueError as error:
            refusals += 1
            assert str(error).endswith(".")
    assert refusals > 200
    for text in ("", "[" * 10**5, "{}", "[]", "null"):
        assert refused(lambda text=text: tables.from_mscclpp(text)).startswith("from_mscclpp: ")
    for change in ({"inplace": False}, {"protocol": "LL"}, {"gpus": []}):
        assert "plan must have" in refused(
            lambda change=change: tables.from_mscclpp(json.dumps(json.loads(texts[0]) | change))
        )
    for old, new in (
        ('"signal"', '"rlxsignal"'),
        ('"size": 1', '"size": 2'),
        ('"scratch_chunks": 4', '"scratch_chunks": 1'),
    ):
        refused(lambda old=old, new=new: tables.from_mscclpp(texts[2].replace(old, new)))
    late = json.loads(tables.to_mscclpp(tables.tree(3, chunks=1)))  # the sum is put before it is complete
    ops = late["gpus"][0]["threadblocks"][0]["ops"]
    put = next(op for op in ops if op["name"] == "put")
    ops.remove(put)
    ops.insert(0, put)
    refused(lambda: tables.from_mscclpp(json.dumps(late)))
    fused = json.loads(texts[2])
    fused["gpus"][0]["threadblocks"][0]["ops"].append({"name": "rres"})
    with raises(
        ValueError,
        "from_mscclpp: the plan must have ops nop, signal, wait, barrier, put, copy and re alone; got 'rres'. Pass a "
        "plan in which all do.",
    ):
        tables.from_mscclpp(json.dumps(fused))
