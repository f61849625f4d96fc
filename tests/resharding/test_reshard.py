"""`reshard`: bits, bytes, memory and errors of what is compiled; the search for the steps has its own tests."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from support.refusals import value_error
from support.training import OPTIMIZERS

X = np.random.default_rng(0).integers(0, 2**31, (16, 8, 24), dtype=np.int32)
WAYS = [  # every kind of step, axes taken apart, several axes at once, a gather on an inner dim
    (P("data"), P(None, "model")),
    (P(("data", "model")), P("model", "data")),
    (P("data", "model"), P("model", "data")),
    (P(("data", "model")), P(None, "model", "data")),
    (P(None, None, "model"), P("data")),
]


# Alone in finding: an executor that puts pieces together in another order than the search assumes.
# proves N5
@pytest.mark.parametrize("source, target", WAYS, ids=str)
@pytest.mark.parametrize("piece_bytes", [2**24, 256])
def test_every_bit_arrives_and_the_census_is_the_closed_form(mesh2x4, source, target, piece_bytes):
    x = sk.shard(X, mesh2x4, source)
    move = lambda x: sk.reshard(x, source, target, mesh=mesh2x4, piece_bytes=piece_bytes)  # noqa: E731
    moved = move(x)
    np.testing.assert_array_equal(moved, X)
    assert moved.sharding == NamedSharding(mesh2x4, target)
    steps = sk.reshard_steps(x, source, target, mesh=mesh2x4)
    found = sk.census(move, x)
    assert found.sent() == steps.sent >= steps.least
    sends = [step for step in steps.leaves[0].legs[0].route.steps if step.sent]
    assert found.count() == len(sends) if piece_bytes == 2**24 else found.count() > len(sends)


# Alone in finding: memory that grows with the number of steps, or with the array where the compiler gathers it whole.
@pytest.mark.optimized
def test_a_device_holds_two_shards_and_a_piece(mesh2x4):
    """P("model") to P(None, "data"): the compiler's own way gathers the whole array to every device."""
    source, target, shape = P("model"), P(None, "data"), (256, 256)
    piece = 2**13
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh2x4, source))
    shards = 4 * (256 * 256 // 4 + 256 * 256 // 2)

    def temp(move):
        memory = jax.jit(move).lower(x).compile().memory_analysis()
        assert memory.argument_size_in_bytes + memory.output_size_in_bytes == shards
        return memory.temp_size_in_bytes

    ours = temp(lambda x: sk.reshard(x, source, target, mesh=mesh2x4, piece_bytes=piece))
    theirs = temp(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh2x4, target)))
    assert ours <= 2 * piece < shards / 10
    assert theirs >= 4 * 256 * 256


def loss(params, batch, keys):
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2)


DRAWS = np.random.default_rng(1)
PARAMS = {"w": DRAWS.normal(size=(8, 16)).astype(np.float32), "v": DRAWS.normal(size=(16, 3)).astype(np.float32)}
BATCH = {"x": DRAWS.normal(size=(8, 8)).astype(np.float32), "y": np.ones((8, 3), np.float32)}
FSDP = sk.chain(sk.fsdp("model", min_size=1, uneven="pad"), sk.dp("data"))
ZERO = sk.chain(sk.zero1("data", min_size=1), sk.dp("model"))


# Alone in finding: optimizer state that stays where the old plan had it.
@pytest.mark.quick("True")
@pytest.mark.parametrize("donate", [False, True])
def test_a_state_goes_on_under_another_plan(mesh2x4, donate):
    grad_fn, optimizer = sk.value_and_grad(loss), OPTIMIZERS["adamw"]
    (init, step), (other, after) = (
        sk.make_train_step(grad_fn, optimizer, mesh=mesh2x4, plan=plan) for plan in (FSDP, ZERO)
    )
    state, _ = step(init(PARAMS, jax.random.key(0)), BATCH)
    copy = jax.tree.map(jnp.copy, state)
    steps = sk.reshard_steps(state, FSDP, ZERO, mesh=mesh2x4)
    assert steps.sent == steps.least > 0
    moved = sk.reshard(state, FSDP, ZERO, mesh=mesh2x4, donate=donate)
    assert copy.params["w"].is_deleted() is False and state.params["w"].is_deleted() is donate
    wanted = other.abstract(PARAMS)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding and a.shape == b.shape, moved, wanted))
    for a, b in zip(jax.tree.leaves(copy._replace(key=0)), jax.tree.leaves(moved._replace(key=0)), strict=True):
        np.testing.assert_array_equal(a, b)
    for _ in range(2):
        copy, expected = step(copy, BATCH)
        moved, metrics = after(moved, BATCH)
        np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)


UNEVEN = {"min_size": 1, "uneven": "pad"}
PADDED = {  # plans that cut 8 columns, 3 rows or 5 numbers at different places, over 2 x 3 devices
    "over 6": sk.fsdp(("a", "b"), **UNEVEN),
    "over 6, other order": sk.fsdp(("b", "a"), **UNEVEN),
    "over 2": sk.chain(sk.dp("b"), sk.fsdp("a", **UNEVEN)),
    "over 3": sk.chain(sk.dp("a"), sk.fsdp("b", **UNEVEN)),
    "state over 6": sk.zero1(("a", "b"), **UNEVEN),
    "whole": sk.dp(("a", "b")),
}
UNLIKE = {  # leaves of which one plan or another pads a dim
    "columns": np.arange(24, dtype=np.float32).reshape(3, 8),
    "numbers": np.arange(5, dtype=np.float32),
    "rows": np.arange(12, dtype=np.float32).reshape(6, 2),  # which can go to another dim instead of being gathered
}


# Alone in finding: shards whose padding comes or goes while the dim is split, so that numbers are lost in silence.
# proves N52 in part
@pytest.mark.quick(
    *("whole-over 6", "over 2-whole", "over 2-over 6", "over 6-over 3"),
    *("over 6-over 6, other order", "state over 6-over 3"),
)
@pytest.mark.parametrize("source", PADDED)
@pytest.mark.parametrize("target", PADDED)
def test_between_all_plans_that_pad_or_not_every_bit_arrives(source, target):
    mesh = sk.make_mesh(a=2, b=3, devices=jax.devices()[:6])
    grad_fn = sk.value_and_grad(lambda params, batch, keys: sum(jnp.sum(x) for x in jax.tree.leaves(params)))
    builders = [sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=PADDED[name]) for name in (source, target)]
    states = [init(UNLIKE, jax.random.key(0)) for init, _ in builders]
    moved = sk.reshard(states[0], PADDED[source], PADDED[target], mesh=mesh)
    for name, wanted in UNLIKE.items():
        np.testing.assert_array_equal(sk.unpadded(moved.params)[name], wanted)
        np.testing.assert_array_equal(sk.unpadded(states[0].params)[name], wanted)
    stored = [[(x.shape, x.sharding) for x in jax.tree.leaves(state)] for state in (moved, states[1])]
    assert stored[0] == stored[1]
    steps = sk.reshard_steps(states[0].params, PADDED[source], PADDED[target], mesh=mesh)
    move = lambda params: sk.reshard(params, PADDED[source], PADDED[target], mesh=mesh)  # noqa: E731
    assert sk.census(move, states[0].params).sent() == steps.sent >= steps.least


# Alone in finding: an axis of one device, an empty array or a scalar that the search or jax refuses.
def test_what_has_nothing_to_send():
    mesh = sk.make_mesh(data=2, one=1, model=4)
    tree = {"a": np.ones((4, 2)), "empty": np.ones((8, 0))}
    source, target = {"a": P(("one", "data")), "empty": P("model")}, {"a": P("data", "one"), "empty": P(None, "model")}
    moved = sk.reshard(sk.shard(tree, mesh, source), source, target, mesh=mesh)
    assert {name: x.sharding.spec for name, x in moved.items()} == target
    x = sk.shard(np.float32(3), mesh, P())
    assert sk.reshard(x, P(), NamedSharding(mesh, P()), mesh=mesh) is x


# Alone in finding: a call inside jit, where arrays have no layout of their own.
def test_inside_jit(mesh2x4):
    source, target = P("data", "model"), P(None, ("model", "data"))
    move = jax.jit(lambda x: sk.reshard(x + 1, source, target, mesh=mesh2x4))
    moved = move(sk.shard(X, mesh2x4, source))
    np.testing.assert_array_equal(moved, X + 1)
    assert moved.sharding.is_equivalent_to(NamedSharding(mesh2x4, target), 3)


def placed(mesh):
    return {"w": sk.shard(np.ones((8, 6), np.float32), mesh, P("data"))}


ERRORS = {
    "reshard: leaf w must be laid out on the mesh as source says, P('model',); got P('data',). Pass the layout "
    "that it has as source, or place it with shard.": lambda mesh: sk.reshard(placed(mesh), P("model"), P(), mesh=mesh),
    "reshard: leaf w must be laid out on the mesh as source says, P('model',); got ndarray. Pass the layout that "
    "it has as source, or place it with shard.": lambda mesh: sk.reshard({"w": np.ones(8)}, P("model"), P(), mesh=mesh),
    "reshard: leaf w: dim 1 must be divisible by axis 'model'; got size 6 over 4 devices. Pad dim 1 or choose "
    "another dim.": lambda mesh: sk.reshard(placed(mesh), P("data"), P(None, "model"), mesh=mesh),
    "reshard_steps: leaf w: the spec P(None, 'modle') uses axis 'modle', which the mesh does not have; its axes "
    "are 'data', 'model'. Use one of them, or add the axis to make_mesh.": lambda mesh: sk.reshard_steps(
        placed(mesh), P("data"), P(None, "modle"), mesh=mesh
    ),
    "reshard: target must be a Plan, or a PartitionSpec or NamedSharding for each leaf; got 'model'. Pass for "
    "example P('model').": lambda mesh: sk.reshard(placed(mesh), P("data"), "model", mesh=mesh),
    "reshard: source and target must be layouts on the mesh; got a NamedSharding in target over {'data': 8}, and "
    "mesh is {'data': 2, 'model': 4}. Pass its mesh; for a target on another mesh pass that one as "
    "to.": lambda mesh: sk.reshard(placed(mesh), P("data"), NamedSharding(sk.make_mesh(data=8), P()), mesh=mesh),
    "reshard: piece_bytes must be at least 1; got 0.": lambda mesh: sk.reshard(
        placed(mesh), P("data"), P(), mesh=mesh, piece_bytes=0
    ),
}


# Alone in finding: an implicit move by jax where source is wrong, and other wording.
@pytest.mark.check
@pytest.mark.parametrize("words, call", ERRORS.items())
def test_errors(mesh2x4, call, words):
    with pytest.raises((ValueError, TypeError), match=re.escape(words)):
        call(mesh2x4)


@pytest.mark.check
def test_errors_of_trees_and_padding(mesh2x4):
    with pytest.raises(ValueError, match="reshard: source must have the structure of the tree, or be a prefix of it; "):
        sk.reshard(placed(mesh2x4), {"v": P("data")}, P(), mesh=mesh2x4)
    w = {"w": jax.ShapeDtypeStruct((5,), jnp.float32)}
    with value_error(
        "reshard_steps: leaf w must be stored as source says, with the shape (6,); got (5,). Pass the plan that "
        "made it as source."
    ):
        sk.reshard_steps(w, sk.fsdp("data", min_size=1, uneven="pad"), sk.dp("data"), mesh=mesh2x4)
