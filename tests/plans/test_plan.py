"""Plans as data: layouts, order, refusals; and where arrays lie, as the parameters' own metadata says."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from support.conformance import toy_tp
from support.layouts import Specs, specs
from support.refusals import raises, refusals, value_error

SHAPES = {"weight": jax.ShapeDtypeStruct((16, 3), jnp.float32), "shift": jax.ShapeDtypeStruct((), jnp.float32)}


@pytest.fixture(scope="module")
def cube():
    return sk.make_mesh(zero=2, model=2, fsdp=2)


def test_dp_keeps_every_leaf_whole_and_splits_the_batch(data8):
    plan = sk.dp("data")
    assert specs(plan.layouts(SHAPES, data8)) == {"weight": Specs(), "shift": Specs()}
    assert plan.batch_spec(data8) == P("data")
    assert str(plan) == "dp('data')"


def test_axes_on_one_dim_stand_in_the_order_of_rank(cube):
    orders = [
        sk.chain(sk.zero1("zero", min_size=1), sk.fsdp("fsdp", min_size=1), toy_tp("model")),
        sk.chain(toy_tp("model"), sk.fsdp("fsdp", min_size=1), sk.zero1("zero", min_size=1)),
        sk.chain(sk.fsdp("fsdp", min_size=1), sk.chain(sk.zero1("zero", min_size=1), toy_tp("model"))),
    ]
    for plan in orders:
        assert specs(plan.layouts(SHAPES, cube))["weight"] == Specs(
            rest=P(("model", "fsdp")), seen=P("model"), update=P(("model", "fsdp", "zero"))
        )
        assert plan.batch_spec(cube) == P(("zero", "fsdp"))  # the mesh's order, whatever the plan's
        assert str(plan) == "toy_tp('model') + fsdp('fsdp') + zero1('zero')"


def test_a_strategy_is_given_the_shape_that_is_left(cube):
    rows_first = sk.fsdp("fsdp", min_size=1, rules=lambda path, shape: 0)
    wide = sk.chain(rows_first, sk.zero1("zero", min_size=1))
    two_rows = {"weight": jax.ShapeDtypeStruct((2, 4), jnp.float32)}
    # fsdp takes both rows, so zero finds one row and splits the columns
    assert specs(wide.layouts(two_rows, cube))["weight"] == Specs(rest=P("fsdp"), seen=P(), update=P("fsdp", "zero"))


@pytest.mark.parametrize(
    "message, make",
    {
        "chain: at least one plan is needed; got none. Pass for example dp('data').": lambda: sk.chain(),
        "chain: axis 'data' is used by dp('data') and by zero1('data'). A mesh axis serves one strategy; "
        "give one of them another axis.": lambda: sk.chain(sk.dp("data"), sk.zero1("data", min_size=1)),
    }.items(),
)
def test_bad_plans_are_refused(make, message):
    with value_error(message):
        make()


def test_an_axis_the_mesh_does_not_have(data8):
    import optax

    with value_error(
        "dp('dta'): the mesh has no axis 'dta'; its axes are data=8. Use one of them, or add the axis to make_mesh."
    ):
        sk.make_train_step(sk.value_and_grad(lambda p, b, k: p), optax.sgd(1.0), mesh=data8, plan=sk.dp("dta"))


HALVES = [("step", "never"), ("never", "step")]
PLACES = refusals(
    {
        "a split must gather the weight and scatter its gradient, or neither; got "
        f"gather={gather!r} with scatter={scatter!r} for leaf weight. Pass 'never' for both if the loss gets the part, "
        "else for none.": sk.Split(0, gather, scatter)
        for gather, scatter in HALVES
    },
    {
        "place must return a Split, the reason why a leaf stays whole, or None; got "
        f"{wrong!r} for leaf weight. Return for example Split(dim=0).": wrong
        for wrong in (0, 1, ("w",))
    },
)


@pytest.mark.check
@pytest.mark.parametrize("kind, message, place", PLACES)
def test_a_place_that_returns_a_dim_or_half_a_split_is_refused(kind, message, place, data8):
    """0 was taken for "left whole"; what gathers a weight and leaves its gradient whole failed deep inside the step."""
    plan = sk.strategy("own", "data", rank=1, batch_dim=0, place=lambda leaf: place)
    with raises(kind, f"own('data'): {message}"):
        plan.layouts({"weight": SHAPES["weight"]}, data8)


@partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["names"])
@dataclass
class Box:
    """A parameter with the logical names of its dims beside it, as module libraries hold it."""

    value: jax.Array
    names: tuple[str, ...]


def is_box(x):
    return isinstance(x, Box)


def boxed(key):
    """Parameters as an initialiser with metadata returns them."""
    first, second = jax.random.split(key)
    return {
        "up": Box(jax.random.normal(first, (16, 32)), ("embed", "hidden")),
        "down": Box(jax.random.normal(second, (32, 16)), ("hidden", "embed")),
        "gain": Box(jnp.ones(16), ("embed",)),
    }


def unboxed(key):
    return jax.tree.map(lambda box: box.value, boxed(key), is_leaf=is_box)


# proves S26: the names that the initialiser attaches decide where parameters and optimizer state are made
@pytest.mark.parametrize("mapped", ["model", None])
def test_metadata_of_the_initialiser_is_kept(mapped, mesh2x4):
    names = jax.tree.map(lambda box: box.names, jax.eval_shape(boxed, jax.random.key(0)), is_leaf=is_box)
    specs = sk.specs_from_rules(names, {"embed": "data" if mapped is None else None, "hidden": "model"})

    def loss(params, batch, keys):
        hidden = sk.layers.column_linear(batch * params["gain"][None], params["up"], "model")
        return sk.Mean.of(sk.layers.row_linear(hidden, params["down"], "model") ** 2)

    if mapped is None:  # the same metadata under other rules, without a step: parameters alone
        params = jax.jit(unboxed, out_shardings=jax.tree.map(lambda s: jax.NamedSharding(mesh2x4, s), specs))(
            jax.random.key(0)
        )
        held = {"up": (8, 8), "down": (8, 8), "gain": (8,)}
    else:
        plan = sk.chain(sk.dp("data"), sk.tp("model", specs))
        init, _ = sk.make_train_step(sk.value_and_grad(loss), optax.adam(1e-3), mesh=mesh2x4, plan=plan)
        state = init(unboxed, jax.random.key(0))
        params, held = state.params, {"up": (16, 8), "down": (8, 16), "gain": (16,)}
        moments = jax.tree.map(lambda x: x.sharding.spec, state.opt_state[0].mu)
        assert moments == specs
    assert jax.tree.map(lambda x: x.sharding.spec, params) == specs
    assert {name: x.addressable_shards[0].data.shape for name, x in params.items()} == held
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), params, unboxed(jax.random.key(0)))
