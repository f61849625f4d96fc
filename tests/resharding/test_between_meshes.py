"""`reshard` to a mesh that shares no device: bits, bytes, memory, checksums and errors, in one process and in two."""

import json
import math
import random
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit._jax.jaxprs import walk
from shardkit.meshes.layout import spec_axes
from shardkit.resharding import between_meshes, transfers
from shardkit.runtime.data.checksums import checksums
from support import jobs
from support.counting import Compiles
from support.refusals import raises, refusals

DTYPES = ["float32", "bfloat16", "int32", "int8", "bool", "complex64", "float8_e4m3fn", "float16"]
ROLLOUT_EXAMPLE = Path(__file__).parents[2] / "examples" / "rollout.py"
TRAINER = {"w": P("fsdp", "tp"), "v": P("tp"), "count": P(), "keys": P("fsdp")}
ROLLOUT = {"w": P(None, "tp"), "v": P(None, "tp"), "count": P("tp"), "keys": P()}


def trainer_and_rollout(**sizes):
    devices = jax.devices()
    return sk.make_mesh(devices[:4], fsdp=2, tp=2), sk.make_mesh(devices[4:], **(sizes or {"tp": 4}))


def params_on(mesh):
    draws = np.random.default_rng(0)
    tree = {"w": draws.normal(size=(8, 12)), "v": draws.normal(size=(4, 8))}
    tree = jax.tree.map(np.float32, tree) | {"count": np.arange(4, dtype=np.int32)}
    placed = {name: sk.shard(x, mesh, TRAINER[name]) for name, x in tree.items()}
    keys = jax.random.split(jax.random.key(0), 4)
    placed["keys"] = jax.jit(lambda: keys, out_shardings=NamedSharding(mesh, TRAINER["keys"]))()
    return placed


def bits(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x).tobytes()


def sends_of(move, *args):
    """The ppermutes of the traced program, (source, target) and bytes, and the axes of all other collectives."""
    sends, others = [], []
    for site in walk(jax.make_jaxpr(move)(*args).jaxpr):
        equation = site.equation
        if equation.primitive.name == "ppermute":
            size = equation.invars[0].aval.size * equation.invars[0].aval.dtype.itemsize
            sends += [(pair, size) for pair in equation.params["perm"]] * site.times
        elif "axis_name" in equation.params and "all" in equation.primitive.name:
            others.append(equation.params["axis_name"])
    return sends, others


@pytest.fixture
def own_programs():
    """Programs are kept from one call to the next: those with a fault are not for other tests."""
    caches = [between_meshes._make_pack, between_meshes._make_send, between_meshes._make_unpack]
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


# What crosses, drawn.


def draw_mesh(draw, devices, names):
    """A mesh of these devices or of fewer, in some order, perhaps with an axis of one device."""
    left = draw.randint(1, len(devices))
    chosen = draw.sample(devices, left)
    sizes = []
    while left > 1:
        prime = next(prime for prime in (2, 3, 5, 7) if left % prime == 0)
        sizes.append(prime)
        left //= prime
    if draw.random() < 0.4 or not sizes:
        sizes.append(1)
    draw.shuffle(sizes)
    return Mesh(np.array(chosen).reshape(sizes), tuple(names[: len(sizes)]), axis_types=(AxisType.Auto,) * len(sizes))


def draw_spec(draw, mesh, dims):
    """Some of the axes, in some order, on some dims."""
    entries = [[] for _ in range(dims)]
    for name in draw.sample(mesh.axis_names, len(mesh.axis_names)):
        if dims and draw.random() < 0.7:
            entries[draw.randrange(dims)].append(name)
    return P(*map(tuple, entries))


def count_parts(spec, mesh):
    return [math.prod(mesh.shape[name] for name in axes) for axes in spec_axes(spec)]


# Alone in finding: a unit written to the place of another, a cast on the wrong side, copies that differ, an order of
# devices or axes that the programs assume, and bytes that the plan does not have.
# proves N69
@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(8, 60))])
def test_every_bit_arrives_and_bytes_are_at_the_bound(seed):
    draw = random.Random(seed)
    devices = draw.sample(jax.devices(), 8)
    cut = draw.randint(1, 7)
    mesh, to = draw_mesh(draw, devices[:cut], "abcd"), draw_mesh(draw, devices[cut:], "wxyz")
    dims = draw.choice([0, 1, 2, 2, 3])
    source, target = draw_spec(draw, mesh, dims), draw_spec(draw, to, dims)
    divisors = map(math.lcm, count_parts(source, mesh), count_parts(target, to))
    shape = tuple(divisor * draw.choice([0, 1, 1, 1, 2, 3, 5]) for divisor in divisors)
    dtype, other = draw.choice(DTYPES), draw.choice([None, None, jnp.bfloat16, jnp.float32])
    whole = np.random.default_rng(seed).integers(0, 100, shape)
    whole = np.asarray(jnp.asarray(whole / 7 if "float" in dtype else whole).astype(dtype))
    x = jax.device_put(whole, NamedSharding(mesh, source))
    options = {"mesh": mesh, "to": to, "dtype": other, "piece_bytes": draw.choice([2**24, 100, 1])}
    wanted = whole
    if other is not None and "float" in dtype:
        wanted = np.asarray(jnp.asarray(whole).astype(other))

    moved = sk.reshard(x, source, target, check=True, **options)
    assert moved.sharding.is_equivalent_to(NamedSharding(to, target), dims) and moved.dtype == wanted.dtype
    for shard in moved.addressable_shards:
        assert bits(shard.data) == np.ascontiguousarray(wanted[shard.index]).tobytes()

    plan = sk.reshard_steps(x, source, target, **options)
    wire = min(whole.dtype.itemsize, wanted.dtype.itemsize)
    assert plan.crossing == plan.least == whole.size * wire
    move = lambda x: sk.reshard(x, source, target, **options)  # noqa: E731
    sends, others = sends_of(move, x)
    assert sum(size for _, size in sends) == plan.crossing
    assert all(sender < mesh.size <= receiver for (sender, receiver), _ in sends)
    assert all(set(axes) <= set(to.axis_names) for axes in others)  # an all_gather of copies, in the target alone
    assert sk.census(move, x).sent() == plan.sent
    with Compiles() as compiles:
        again = move(x)
    assert (compiles.count, bits(again)) == (0, bits(moved))


# Alone in finding: shards of an empty array in the whole array's shape, which is what XLA makes of them.
def test_an_empty_array_is_laid_out_as_others():
    mesh, to = trainer_and_rollout()
    x = sk.shard(np.ones((8, 0), np.float32), mesh, P("fsdp"))
    moved = sk.reshard(x, P("fsdp"), P("tp"), mesh=mesh, to=to, dtype=jnp.bfloat16, check=True)
    assert [shard.data.shape for shard in moved.addressable_shards] == [(2, 0)] * 4
    assert (moved.shape, moved.dtype, moved.sharding) == ((8, 0), jnp.bfloat16, NamedSharding(to, P("tp")))


def test_copies_cross_once():
    """Four copies in the target: each receives a quarter, and gathers the others there."""
    mesh, to = trainer_and_rollout(replica=4)
    x = sk.shard(np.arange(64, dtype=np.float32).reshape(8, 8), mesh, P("fsdp", "tp"))
    plan = sk.reshard_steps(x, P("fsdp", "tp"), P(), mesh=mesh, to=to)
    assert plan.crossing == plan.least == 256
    assert plan.sent == 64 + 3 * 64
    (leaf,) = plan.leaves
    assert [step.pairs for step in leaf.steps] == [((0, 0), (1, 1), (2, 2), (3, 3))]


def test_the_plan_prints_steps_bytes_and_staging():
    mesh, to = trainer_and_rollout()
    shapes = {"w": jax.ShapeDtypeStruct((8, 12), jnp.float32), "b": jax.ShapeDtypeStruct((12,), jnp.int32)}
    source, target = {"w": P("fsdp", "tp"), "b": P()}, {"w": P(None, "tp"), "b": P()}
    plan = sk.reshard_steps(shapes, source, target, mesh=mesh, to=to, dtype=jnp.bfloat16)
    assert str(plan).splitlines() == [
        "leaf  from             to             wire      steps                      bytes  must cross  staging/device",
        "b     P()              P()            int32     1 ppermute, all_gather tp  48     48          72",
        "w     P('fsdp', 'tp')  P(None, 'tp')  bfloat16  2 ppermutes                192    192         96",
        "240 bytes cross from 4 devices to 4 others, and 240 must; staging is at most 168 bytes on a device",
    ]
    assert str(plan.leaves[1]).splitlines() == [
        "w: 2 ppermutes; a unit is 4x3 in bfloat16",
        "  1. 0 to 4, 1 to 6, 2 to 5, 3 to 7: 24 bytes each, 96 in all",
        "  2. 0 to 5, 1 to 7, 2 to 4, 3 to 6: 24 bytes each, 96 in all",
    ]
    abstract = sk.reshard_steps(
        shapes, source, target, mesh=sk.abstract_mesh(fsdp=2, tp=2), to=sk.abstract_mesh(tp=4), dtype=jnp.bfloat16
    )
    assert str(abstract) == str(plan)


# Memory.


# Alone in finding: pieces that are all in memory at once because Python runs ahead of the devices, and a program that
# holds more than the pieces that it was given.
@pytest.mark.parametrize("piece_bytes", [2**24, 4096, 1000])
@pytest.mark.parametrize("target", [P(None, "tp"), P("tp")], ids=str)
def test_a_device_holds_no_more_staging_than_it_may(monkeypatch, piece_bytes, target):
    mesh, to = trainer_and_rollout(replica=2, tp=2)
    tree = {name: sk.shard(np.ones((64, 64), np.float32), mesh, P("fsdp", "tp")) for name in "abc"}
    options = {"mesh": mesh, "to": to, "dtype": jnp.bfloat16, "piece_bytes": piece_bytes}
    plan = sk.reshard_steps(tree, P("fsdp", "tp"), target, **options)
    assert plan.staging <= piece_bytes
    sk.reshard(tree, P("fsdp", "tp"), target, **options)  # compiles
    known = {id(x) for x in jax.live_arrays()}
    most = [0]

    def staged():
        """Bytes of the pieces on the device that has most: of live arrays that are neither source nor target."""
        held = dict.fromkeys(jax.devices(), 0)
        seen = set()
        for x in jax.live_arrays():
            if id(x) in known or x.shape == (64, 64):
                continue
            for shard in x.addressable_shards:
                pointer = shard.data.unsafe_buffer_pointer()
                if pointer not in seen:
                    seen.add(pointer)
                    held[shard.device] += shard.data.nbytes
        return max(held.values())

    make_unpack = between_meshes._make_unpack

    def watched(*args):
        unpack = make_unpack(*args)

        def call(*operands):
            most[0] = max(most[0], staged())
            return unpack(*operands)

        return call

    monkeypatch.setattr(between_meshes, "_make_unpack", watched)
    sk.reshard(tree, P("fsdp", "tp"), target, **options)
    assert 0 < most[0] <= plan.staging


# Alone in finding: a program that holds a shard more, or all pieces at once.
@pytest.mark.optimized
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])  # XLA computes bfloat16 in float32 on CPU
@pytest.mark.parametrize("sizes", [{"tp": 4}, {"replica": 2, "tp": 2}], ids=str)
def test_programs_hold_the_pieces_and_no_more(monkeypatch, own_programs, dtype, sizes):
    mesh, to = trainer_and_rollout(**sizes)
    held = []

    def measure(program, operands):
        memory = program.lower(*operands).compile().memory_analysis()
        size = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
        held.append(size - memory.alias_size_in_bytes)

    def watch(name, shards):
        make = getattr(between_meshes, name)

        def make_watched(*args):
            program = make(*args)

            def call(*operands):
                measure(program, operands)
                held[-1] -= shards
                return program(*operands)

            return call

        monkeypatch.setattr(between_meshes, name, make_watched)

    target_shard = 256 * 256 // sizes["tp"] * jnp.dtype(dtype).itemsize
    watch("_make_pack", 4 * 256 * 256 // 4)
    watch("_make_send", 0)
    watch("_make_unpack", target_shard)  # which is overwritten where it is
    x = sk.shard(np.ones((256, 256), np.float32), mesh, P("fsdp", "tp"))
    options = {"mesh": mesh, "to": to, "dtype": dtype, "piece_bytes": 2**14}
    sk.reshard(x, P("fsdp", "tp"), P(None, "tp"), **options)
    plan = sk.reshard_steps(x, P("fsdp", "tp"), P(None, "tp"), **options)
    assert plan.staging <= 2**14
    assert max(held) <= plan.staging + 2048  # tables and counters


def test_a_donated_tree_is_deleted_leaf_by_leaf():
    mesh, to = trainer_and_rollout()
    params = params_on(mesh)
    wanted = jax.tree.map(bits, params)
    moved = sk.reshard(params, TRAINER, ROLLOUT, mesh=mesh, to=to, donate=True, check=True)
    assert all(x.is_deleted() for x in params.values())
    assert jax.tree.map(bits, moved) == wanted


# What arrived.


def test_checksums_say_arrived_and_are_those_of_any_mesh():
    mesh, to = trainer_and_rollout()
    params = params_on(mesh)
    plan = sk.reshard_steps(params, TRAINER, ROLLOUT, mesh=mesh, to=to, dtype=jnp.bfloat16)
    moved = sk.reshard(params, TRAINER, ROLLOUT, mesh=mesh, to=to, dtype=jnp.bfloat16)
    arrival = plan.arrived(params, moved)
    assert arrival.lost == ()
    assert {leaf.path: leaf.checksum for leaf in arrival.leaves} == checksums(
        {**moved, "keys": jax.random.key_data(moved["keys"])}
    )
    assert [line.split() for line in str(arrival).splitlines()] == [
        ["leaf", "checksum"],
        *[[leaf.path, f"{leaf.checksum:08x}", "arrived"] for leaf in arrival.leaves],
    ]


# Alone in finding: a source whose copies are not the same, of which each sent a part.
def test_copies_that_differ_are_found():
    mesh, to = trainer_and_rollout()
    copies = [jax.device_put(np.arange(4) + 10 * (n == 0), device) for n, device in enumerate(mesh.devices.flat)]
    x = jax.make_array_from_single_device_arrays((4,), NamedSharding(mesh, P()), copies)
    plan = sk.reshard_steps(x, P(), P("tp"), mesh=mesh, to=to)
    (leaf,) = plan.arrived(x, sk.reshard(x, P(), P("tp"), mesh=mesh, to=to)).lost
    # By the first copy, which is alone in differing: what it sent itself has arrived.
    assert [(block.device, block.block) for block in leaf.lost] == [(n, (slice(n - 4, n - 3),)) for n in (5, 6, 7)]


def drop(keep):
    """The ppermute without some of its messages: their receivers get zeros."""

    def plant(monkeypatch):
        permute = between_meshes.permute
        monkeypatch.setattr(between_meshes, "permute", lambda x, names, pairs: permute(x, names, keep(pairs)))

    return plant


def swap_receivers(monkeypatch):
    permute = between_meshes.permute

    def swapped(x, names, pairs):
        (a, b), (c, d), *others = pairs
        return permute(x, names, [(a, d), (c, b), *others])

    monkeypatch.setattr(between_meshes, "permute", swapped)


def write_elsewhere(monkeypatch):
    """On one device of the target each unit overwrites the one before it."""
    write_units = between_meshes._write_units

    def write(out, units, writes, wire):
        starts = jnp.where(lax.axis_index("tp") == 2, 0, writes.starts)
        return write_units(out, units, writes._replace(starts=starts), wire)

    monkeypatch.setattr(between_meshes, "_write_units", write)


def flip_a_bit(monkeypatch):
    """On one device of the target, in every element."""
    write_units = between_meshes._write_units

    def write(out, units, writes, wire):
        wrong = units ^ jnp.where(lax.axis_index("tp") == 3, jnp.uint16(1), jnp.uint16(0))
        return write_units(out, wrong, writes, wire)

    monkeypatch.setattr(between_meshes, "_write_units", write)


def forget_a_unit(monkeypatch):
    """One device of the target does not write what it received."""
    write_units = between_meshes._write_units

    def write(out, units, writes, wire):
        counts = jnp.where(lax.axis_index("tp") == 1, 0, writes.counts)
        return write_units(out, units, writes._replace(counts=counts), wire)

    monkeypatch.setattr(between_meshes, "_write_units", write)


def forget_a_round(monkeypatch):
    """The plan itself lacks a round: sender and receiver agree, and both are wrong."""
    find_rounds = transfers.find_rounds

    def shorter(*args):
        route = find_rounds(*args)
        return route._replace(rounds=route.rounds[:-1])

    monkeypatch.setattr(transfers, "find_rounds", shorter)


# What is planted, and who lacks what of `w`, 8x12 from 2x2 devices to columns on four.
LOST = {
    "a message is dropped": (drop(lambda pairs: [pair for pair in pairs if pair != (0, 4)]), {4: ["0:4"]}),
    "all messages are dropped": (drop(lambda pairs: []), {n: ["0:4", "4:8"] for n in (4, 5, 6, 7)}),
    "two receivers are swapped": (swap_receivers, {4: ["0:4"], 5: ["0:4"], 6: ["0:4"], 7: ["0:4"]}),
    "a unit is written to the place of another": (write_elsewhere, {6: ["0:4", "4:8"]}),
    "what arrived is not written": (forget_a_unit, {5: ["0:4", "4:8"]}),
    "one bit is flipped": (flip_a_bit, {7: ["0:4", "4:8"]}),
    "the plan forgets a round": (forget_a_round, {4: ["4:8"], 5: ["0:4"], 6: ["4:8"], 7: ["0:4"]}),
}


# proves N69: a piece that is lost, swapped or changed is named by its leaf, its device and its place
@pytest.mark.parametrize("fault", LOST)
def test_a_lost_piece_is_found(monkeypatch, own_programs, fault):
    plant, lost = LOST[fault]
    mesh, to = trainer_and_rollout()
    params = {"w": params_on(mesh)["w"]}
    options = {"mesh": mesh, "to": to, "dtype": jnp.bfloat16}
    plan = sk.reshard_steps(params, TRAINER["w"], ROLLOUT["w"], **options)
    plant(monkeypatch)
    moved = sk.reshard(params, TRAINER["w"], ROLLOUT["w"], **options)
    (leaf,) = plan.arrived(params, moved).lost
    found = {}
    for block in leaf.lost:
        rows, columns = block.block
        assert (columns.start, columns.stop) == (3 * block.coordinates["tp"], 3 * block.coordinates["tp"] + 3)
        found.setdefault(block.device, []).append(f"{rows.start}:{rows.stop}")
    assert found == lost
    with pytest.raises(RuntimeError, match=r"reshard: every bit must arrive; w is lost: device [4-7] "):
        sk.reshard(params, TRAINER["w"], ROLLOUT["w"], check=True, **options)


def test_what_is_lost_is_told_in_one_sentence(monkeypatch, own_programs):
    mesh, to = trainer_and_rollout()
    params = params_on(mesh)
    drop(lambda pairs: [pair for pair in pairs if pair != (0, 4)])(monkeypatch)  # of `count` zeros, which are right
    with raises(
        RuntimeError,
        "reshard: every bit must arrive; keys is lost: device 4 (tp=0) lacks [0:2, 0:2], and 3 more blocks; v is lost: "
        "device 4 (tp=0) lacks [0:2, 0:2]; w is lost: device 4 (tp=0) lacks [0:4, 0:3]. Move the tree again, and look "
        "for copies that differ on its own mesh with runtime.replica_drift.",
    ):
        sk.reshard(params, TRAINER, ROLLOUT, mesh=mesh, to=to, check=True)


# Alone in finding: what waits, or sends, in one process alone, and a verdict that processes do not share.
# proves N69: a trainer of 4 devices and a rollout of 4 others, a process each or both in both
def test_between_processes_every_bit_arrives(tmp_path):
    ended = jobs.run("across.py", tmp_path, processes=2, devices=4, timeout=600)
    assert [each.code for each in ended] == [0, 0], "\n".join(each.output for each in ended)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert len(first) == 5
    lost = first.pop("lost")
    for case, saw in first.items():
        assert saw["wrong"] == [], case
        assert saw["bytes"][0] == saw["bytes"][1] == (466 if "bfloat16" in case else 852)
        assert saw["arrival"].count("arrived") == 7
    assert lost == (
        "reshard: every bit must arrive; flags is lost: device 2 (replica=0, tp=0) lacks [0:2, 0:4], and 1 more block; "
        "w is lost: device 3 (replica=0, tp=1) lacks [0:4, 6:12], and 1 more block. Move the tree again, and look for "
        "copies that differ on its own mesh with runtime.replica_drift."
    )


# Alone in finding: weights of the rollout that are not those of the trainer, so that it does not learn, and programs
# of a process without devices of their mesh that wait for it.
# proves N69: from a trainer to a rollout and back, one text in one process and in two
def test_a_trainer_and_a_rollout_are_one_text_in_one_process_and_in_two(capsys):
    assert len(ROLLOUT_EXAMPLE.read_text().splitlines()) <= 80
    with jax.numpy_dtype_promotion("standard"):  # for optax
        _, rewards = runpy.run_path(str(ROLLOUT_EXAMPLE))["run"](*trainer_and_rollout(), 40)
    rewards = [f"{reward:.2f}" for reward in map(float, rewards[::8])]
    assert float(rewards[0]) < 0.4 and float(rewards[-1]) > 0.8
    alone = capsys.readouterr().err
    assert "768 bytes cross from 4 devices to 4 others, and 768 must" in alone
    assert alone.count("arrived") == 2
    job = jobs.Job([str(ROLLOUT_EXAMPLE)], processes=2, devices=4, each=lambda rank: {})
    first, second = job.wait(600)
    assert (first.code, second.code) == (0, 0), first.output + second.output
    for line in (*alone.splitlines(), " ".join(rewards)):  # gloo prints between them
        assert line in first.output


# Compositions.


def loss(params, batch, keys):
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2)


# Alone in finding: a state whose leaves go to other places than the plan of the other mesh says.
def test_a_state_goes_on_under_another_plan_on_other_devices():
    mesh, to = sk.make_mesh(jax.devices()[:4], data=2, fsdp=2), sk.make_mesh(jax.devices()[4:7], zero=3)
    plan, other = sk.chain(sk.dp("data"), sk.fsdp("fsdp", min_size=1)), sk.zero1("zero", min_size=1)
    draws = np.random.default_rng(1)
    params = {"w": draws.normal(size=(8, 6)).astype(np.float32), "v": draws.normal(size=(6, 12)).astype(np.float32)}
    batch = {"x": draws.normal(size=(12, 8)).astype(np.float32), "y": np.ones((12, 12), np.float32)}
    grad_fn, optimizer = sk.value_and_grad(loss), optax.sgd(0.1, momentum=0.9)
    init, step = sk.make_train_step(grad_fn, optimizer, mesh=mesh, plan=plan)
    init_other, step_other = sk.make_train_step(grad_fn, optimizer, mesh=to, plan=other)
    state, _ = step(init(params, jax.random.key(0)), batch)
    moved = sk.reshard(state, plan, other, mesh=mesh, to=to, check=True)
    wanted = init_other.abstract(params)
    for x, y in zip(jax.tree.leaves(moved), jax.tree.leaves(wanted), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim) and (x.shape, x.dtype) == (y.shape, y.dtype)
    for _ in range(2):
        state, expected = step(state, batch)
        moved, metrics = step_other(moved, batch)
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)


def test_axes_of_any_type_and_a_mesh_in_the_context():
    devices = np.array(jax.devices())
    explicit = (AxisType.Explicit,) * 3
    mesh = Mesh(devices[:4].reshape(2, 1, 2), ("fsdp", "one", "tp"), axis_types=explicit)
    to = Mesh(devices[4:].reshape(2, 1, 2), ("replica", "one", "tp"), axis_types=explicit)
    whole = np.arange(32, dtype=np.float32).reshape(8, 4)
    x = jax.device_put(whole, NamedSharding(mesh, P("fsdp", ("one", "tp"))))
    moved = sk.reshard(x, P("fsdp", ("one", "tp")), P(("one", "tp")), mesh=mesh, to=to, check=True)
    assert bits(moved) == whole.tobytes() and moved.sharding == NamedSharding(to, P(("one", "tp")))
    auto, other = trainer_and_rollout()
    with jax.set_mesh(auto):
        moved = sk.reshard(sk.shard(whole, specs=P("fsdp")), P("fsdp"), P("tp"), to=other, check=True)
    assert bits(moved) == whole.tobytes() and moved.sharding == NamedSharding(other, P("tp"))


def test_to_the_same_mesh_is_a_move_on_it(mesh2x4):
    x = sk.shard(np.arange(32).reshape(8, 4), mesh2x4, P("data"))
    moved = sk.reshard(x, P("data"), P("model"), mesh=mesh2x4, to=mesh2x4)
    assert moved.sharding == NamedSharding(mesh2x4, P("model"))


# Errors.


def padded(mesh, to):
    plan = sk.chain(sk.fsdp("fsdp", min_size=1, uneven="pad"), sk.dp("tp"))
    grad_fn = sk.value_and_grad(lambda w, batch, keys: jnp.sum(w))
    init, _ = sk.make_train_step(grad_fn, optax.sgd(1.0), mesh=mesh, plan=plan)
    params = init(np.ones(3, np.float32), jax.random.key(0)).params
    return sk.reshard(params, P("fsdp"), P(), mesh=mesh, to=to)


def w_on(mesh):
    return {"w": sk.shard(np.ones((8, 6), np.float32), mesh, P("fsdp"))}


def to_int8(mesh, to):
    return sk.reshard(w_on(mesh), P("fsdp"), P(), mesh=mesh, to=to, dtype=jnp.int8)


def to_the_same(mesh, to):
    return sk.reshard(w_on(mesh), P("fsdp"), P(), mesh=mesh, to=mesh, check=True)


def not_as_said(mesh, to):
    return sk.reshard(w_on(mesh), P("tp"), P(), mesh=mesh, to=to)


def no_staging(mesh, to):
    return sk.reshard_steps(w_on(mesh), P("fsdp"), P(), mesh=mesh, to=to, piece_bytes=0)


def no_array(mesh, to):
    return sk.reshard({"w": 3.0}, P(), P(), mesh=mesh, to=to)


def traced(mesh, to):
    move = jax.jit(lambda x: sk.reshard(x, P("fsdp"), P(), mesh=mesh, to=to, check=True))
    return move(w_on(mesh))


def traced_in_a_context(mesh, to):
    explicit = Mesh(to.devices, to.axis_names, axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        return sk.census(lambda x: sk.reshard(x, P("fsdp"), P(), to=explicit), w_on(mesh))


ERRORS = refusals(
    {
        "reshard: dtype is for a move to another mesh; got dtype=<class 'jax.numpy.float16'>, and to is none. Pass "
        "to=, or leave dtype out.": lambda mesh, to: sk.reshard(
            w_on(mesh), P("fsdp"), P(), mesh=mesh, dtype=jnp.float16
        ),
        "reshard: check is for a move to another mesh; got check=True, and to is the same mesh. Pass to=, or leave "
        "check out.": to_the_same,
        "reshard: dtype is for floating leaves, others keep theirs; got int8. Pass for example jnp.bfloat16.": to_int8,
        "reshard: mesh and to must share no device, or be equal; got 2 devices in both, the first with id 2. Make them "
        "of other devices, as make_mesh(jax.devices()[:4], data=4).": lambda mesh, to: sk.reshard(
            w_on(mesh), P("fsdp"), P(), mesh=mesh, to=sk.make_mesh(jax.devices()[2:6], a=4)
        ),
        "reshard: leaf w: dim 1 must be divisible by axis 'tp'; got size 6 over 4 devices. Pad dim 1 or choose another "
        "dim.": lambda mesh, to: sk.reshard(w_on(mesh), P("fsdp"), P(None, "tp"), mesh=mesh, to=to),
        "reshard: leaf w: the spec P('fsdp',) uses axis 'fsdp', which the mesh does not have; its axes are 'tp'. Use "
        "one of them, or add the axis to make_mesh.": lambda mesh, to: sk.reshard(
            w_on(mesh), P("fsdp"), P("fsdp"), mesh=mesh, to=to
        ),
        "reshard: leaf w must be laid out on the mesh as source says, P('tp',); got P('fsdp',). Pass the layout that "
        "it has as source, or place it with shard.": not_as_said,
        "reshard: leaf (the whole tree) must be stored in its original form between two meshes; got one that a plan "
        "pads, or stores in the order of stages. Pass unpadded(...) of it, and layouts that divide it.": padded,
        "reshard: a move to another mesh is several programs, which jax traces for a census alone, over Auto axes, "
        "without jax.set_mesh and check; got check=True. Call it outside of jit.": traced,
        "reshard: a move to another mesh is several programs, which jax traces for a census alone, over Auto axes, "
        "without jax.set_mesh and check; got a mesh of jax.set_mesh and axes that are not Auto. Call it outside of "
        "jit.": traced_in_a_context,
        "reshard_steps: piece_bytes must be at least 1; got 0. Pass piece_bytes=1 or more.": no_staging,
    },
    {
        "reshard: every leaf must be an array; leaf w is 3.0. Pass jnp.asarray of it, or take it out of the tree.": (
            no_array
        ),
    },
)


@pytest.mark.parametrize(("kind", "message", "call"), ERRORS)
def test_errors(kind, message, call):
    with raises(kind, message):
        call(*trainer_and_rollout())
