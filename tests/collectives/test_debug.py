"""debug_print: all devices' values by one call, in the order of the mesh, whatever surrounds it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.analysis import census, lint
from support.pipelines import pipelined_grad

BOTH = P(("data", "model"))


def printed(capsys, fn, *args):
    """What is printed by a call, after all of its callbacks."""
    capsys.readouterr()
    jax.block_until_ready(fn(*args))
    jax.effects_barrier()
    return capsys.readouterr().out


def twice(x):
    """Prints the carry of a scan over two turns, what varies over one axis, and what varies over none."""

    def turn(x, i):
        sk.collectives.debug_print({"x": x, "index": sk.axis_index("data"), "turn": i}, "loop")
        return x * 2, None

    x, _ = jax.lax.scan(turn, x, jnp.arange(2))
    return jnp.sum(x**2, keepdims=True)


def expected(x):
    """The text for one number per device on data=2 x model=4."""
    lines = []
    for turn in range(2):
        lines += ["loop.index: int32[] on each device, the same along 'model'", "data=0  0", "data=1  1"]
        lines += ["loop.turn: int32[] on each device, the same along 'data', 'model'", str(turn)]
        lines += ["loop.x: float32[1] on each device"]
        lines += [f"data={i // 4} model={i % 4}  [{each * 2.0**turn:.0f}.]" for i, each in enumerate(x)]
    return "\n".join(lines) + "\n"


# It alone finds a line out of order, one that another device's splits, and a print that a transformation drops.
def test_under_jit_scan_and_grad(mesh2x4, capsys):
    x = jnp.arange(3.0, 11.0)
    each = jax.shard_map(twice, mesh=mesh2x4, in_specs=BOTH, out_specs=BOTH)

    def outside(x):
        return jax.value_and_grad(lambda x: each(x).sum())(x)

    def inside(x):
        return jax.shard_map(jax.grad(lambda x: twice(x).sum()), mesh=mesh2x4, in_specs=BOTH, out_specs=BOTH)(x)

    for fn in (each, outside, inside):
        assert printed(capsys, jax.jit(fn), x) == expected(x)
    np.testing.assert_array_equal(jax.jit(outside)(x)[1], 2 * 16 * x)  # the gather adds nothing to the gradient
    jax.effects_barrier()


def test_of_a_loss_under_a_plan(mesh2x4, capsys):
    def loss(params, batch, keys):
        error = batch["x"] @ params["w"]
        sk.collectives.debug_print(error, "error")
        return sk.Mean.of(error**2)

    plan = sk.chain(sk.dp("data"), sk.fsdp("model", min_size=1))
    init, step = sk.make_train_step(sk.value_and_grad(loss), optax.sgd(0.1), mesh=mesh2x4, plan=plan)
    state = init({"w": jnp.ones((4, 2))}, jax.random.key(0))
    rows = [f"data={i // 4} model={i % 4}  [[{4 * i}. {4 * i}.]]" for i in range(8)]
    batch = {"x": jnp.broadcast_to(jnp.arange(8.0)[:, None], (8, 4))}
    assert printed(capsys, step, state, batch) == "\n".join(["error: float32[1, 2] on each device", *rows]) + "\n"


def test_two_rows_keys_booleans_and_nothing(capsys):
    mesh = sk.make_mesh(jax.devices()[:2], a=2)

    def show(x, key):
        sk.collectives.debug_print({"flag": x > 1, "key": sk.fold_axis(key, "a"), "none": x[:0], "x": x})

    fn = jax.jit(jax.shard_map(show, mesh=mesh, in_specs=(P("a"), P()), out_specs=None))
    assert printed(capsys, fn, jnp.arange(4.0).reshape(4, 1), jax.random.key(0)) == (
        "x.flag: bool[2, 1] on each device\n"
        "a=0  [[False]\n      [False]]\na=1  [[ True]\n      [ True]]\n"
        "x.key: key<fry>[] on each device\n"
        "a=0  [1797259609 2579123966]\na=1  [ 928981903 3453687069]\n"
        "x.none: float32[0, 1] on each device\n"
        "a=0  []\na=1  []\n"
        "x.x: float32[2, 1] on each device\n"
        "a=0  [[0.]\n      [1.]]\na=1  [[2.]\n      [3.]]\n"
    )


def test_outside_of_shard_map_and_under_vmap(capsys):
    assert printed(capsys, lambda: sk.collectives.debug_print(jnp.arange(2), "w")) == "w: int32[2]\n[0 1]\n"
    named = jax.vmap(lambda x: sk.collectives.debug_print(x), axis_name="a")
    assert printed(capsys, named, jnp.arange(2)) == "x: int32[] on each device\na=0  0\na=1  1\n"


def test_groups_print_on_their_own(mesh2x4, capsys):
    show = jax.shard_map(
        lambda x: sk.collectives.debug_print(x, axis="model"), mesh=mesh2x4, in_specs=BOTH, out_specs=None
    )
    lines = printed(capsys, jax.jit(show), jnp.arange(8)).splitlines()
    groups = ["\n".join(lines[:5]), "\n".join(lines[5:])]
    assert sorted(groups) == [
        f"x: int32[1] on each device at data={i}\n" + "\n".join(f"model={j}  [{4 * i + j}]" for j in range(4))
        for i in range(2)
    ]


def test_in_a_stage_of_a_pipeline(capsys):
    """Every microbatch of every stage, forward and recomputed."""

    def stage(layers, x, keys):
        sk.collectives.debug_print(x[0], "x", axis="data")
        return sk.scan_layers(lambda w, x: x + w, layers, x)

    schedule = sk.schedules.one_f_one_b(2, 4)
    over = {"embed": lambda s, b, k: b, "stage": stage, "head": lambda s, x, b: jnp.mean(x**2)}
    grad_fn = pipelined_grad(*over.values(), schedule, "stage", mode="branch")
    mesh = sk.make_mesh(jax.devices()[:4], data=2, stage=2)
    plan = sk.chain(sk.pp("stage"), sk.dp("data"))
    init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=plan)
    state = init({"layers": jnp.ones(2)}, jax.random.key(0))
    lines = printed(capsys, step, state, jnp.arange(8.0)).splitlines()
    heads = ["x: float32[] on each device at stage=0", "x: float32[] on each device at stage=1"]
    assert [line for line in lines if line in heads].count(heads[0]) == len(lines) // 6
    for at, head in enumerate(heads):
        found = {"\n".join(lines[i + 1 : i + 3]) for i, line in enumerate(lines) if line == head}
        assert found == {f"data=0  {i + at:.1f}\ndata=1  {i + 4 + at:.1f}" for i in range(4)}


@pytest.mark.check
def test_its_cost_is_a_gather_over_the_axes_that_differ():
    mesh = sk.abstract_mesh(data=2, model=4)

    def show(x):
        sk.collectives.debug_print(x)
        return x

    for spec, axes, sent in ((P("model"), ("model",), 3), (P(), (), 0), (P(("data", "model")), ("data", "model"), 7)):
        fn = jax.shard_map(show, mesh=mesh, in_specs=spec, out_specs=spec)
        x = jax.ShapeDtypeStruct((16,), np.float32)
        rows = census(fn, x).rows
        piece = 64 // (sent + 1)
        assert [(row.kind, row.axes, row.total) for row in rows] == [("all_gather", axes, piece * sent)] * bool(axes)
        assert lint(fn, x) == []
