"""Which dim a strategy splits, from a function or from a tree of specs."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.models import transformer
from shardkit.plans.dim_rules import make_dim_chooser
from shardkit.plans.plan import strategy
from shardkit.plans.splits import LeafLayout, Split
from support.refusals import raises, value_error

is_layout = lambda x: isinstance(x, LeafLayout)  # noqa: E731
SPECS = {"embed": P(None, "d"), "layers": {"up": P(None, None, ("t", "d")), "gain": P()}}


def test_the_dim_is_the_one_on_which_the_axis_stands():
    choose = make_dim_chooser("fsdp", ("d",), SPECS)
    assert choose("embed", (8, 8)) == 1
    assert choose("layers.up", (2, 8, 8)) == 2
    assert choose("layers.gain", (2, 8)) is None
    assert make_dim_chooser("fsdp", ("t", "d"), SPECS)("layers.up", (2, 8, 8)) == 2


@pytest.mark.check
def test_a_function_may_count_from_the_end():
    choose = make_dim_chooser("fsdp", ("d",), lambda path, shape: {"w": -1, "v": 0}.get(path))
    assert [choose(name, (4, 8)) for name in ("w", "v", "b")] == [1, 0, None]


# A negative dim of ep went on the leaf and on dim 0 of what is left of it; True was 1.
@pytest.mark.check
@pytest.mark.parametrize("make", [sk.ep, sk.tp, partial(sk.fsdp, min_size=1), partial(sk.zero2, min_size=1)])
def test_dims_from_the_end_and_dims_that_are_none(make):
    mesh, params = sk.abstract_mesh(d=2, e=4), {"w": jax.ShapeDtypeStruct((2, 8, 4), jnp.float32)}
    other = sk.zero1("d", min_size=1, rules=lambda path, shape: -1)

    def layout(dim):
        return sk.chain(make("e", rules=lambda path, shape: dim), other).layouts(params, mesh)["w"]

    assert layout(-2) == layout(1)
    assert layout(-2).update == P(None, "e", "d")
    name = make("e", rules=lambda path, shape: 0).strategies[0].name.partition("(")[0]
    for dim, kind, found in (
        (3, ValueError, "dim must name a dimension of the array; got 3 for an array of rank 3. Choose 0 to 2."),
        (-4, ValueError, "dim must name a dimension of the array; got -4 for an array of rank 3. Choose 0 to 2."),
        *(
            (
                dim,
                TypeError,
                f"rules must return a dim, or None for a leaf that stays whole; got {dim!r}. Return an int or None.",
            )
            for dim in (True, 1.0, "1")
        ),
    ):
        with raises(kind, f"{name}: leaf w: {found}"):
            layout(dim)


@pytest.mark.check
def test_the_placement_of_a_strategy_of_ones_own_may_count_from_the_end():
    own = strategy("own", "e", rank=0, place=lambda leaf: Split(-2))
    params = {"w": jax.ShapeDtypeStruct((2, 8, 4), jnp.float32)}
    plan = sk.chain(own, sk.fsdp("d", min_size=1, rules=lambda path, shape: 1))
    assert plan.layouts(params, sk.abstract_mesh(d=2, e=4))["w"].rest == P(None, ("e", "d"))


# Of a list only dim 0 of what is in it may be left to split: the experts, the rows of a gain.
@pytest.mark.check
def test_in_a_list_of_layers_dim_0_is_no_layer():
    mesh, leaf = sk.abstract_mesh(e=4), jax.ShapeDtypeStruct((4, 8, 3), jnp.float32)
    gain = jax.ShapeDtypeStruct((4,), jnp.float32)
    stack = {"layers": {"experts": {"w": leaf}, "gain": gain}}
    listed = {"layers": [{"experts": {"w": leaf}, "gain": gain}] * 2}
    by_layer = sk.fsdp("e", layerwise=("layers",), min_size=1)
    rests = lambda plan, params: [x.rest for x in jax.tree.leaves(plan.layouts(params, mesh), is_leaf=is_layout)]  # noqa: E731
    assert rests(sk.ep("e"), stack) == [P(None, "e"), P()]
    assert rests(sk.ep("e"), listed) == [P("e"), P()] * 2
    assert rests(by_layer, stack) == [P(None, "e"), P()]
    assert rests(by_layer, listed) == [P(None, "e"), P("e")] * 2
    pair = {"layers": (leaf, gain)}  # a tuple of stacks is a stack
    assert rests(by_layer, pair) == [P(None, "e"), P()]


@pytest.mark.parametrize(
    "message, refusal",
    {
        "tp: the rules have no spec for leaf layers.down; theirs are for the leaves 'embed', 'layers.gain', "
        "'layers.up'. Add \"down\": P() to 'layers', with which it stays whole, or make the rules from the logical "
        "axes of these parameters.": (
            SPECS,
            ("d",),
            ("layers.down", (2, 8, 8)),
        ),
        "tp: the rules must put axis 'd' on one dim of leaf embed; got (None, 'd') for shape (8,). "
        "Map one of the leaf's logical axes to it.": (SPECS, ("d",), ("embed", (8,))),
        "tp: the rules must put axes 'a', 'b' on one dim of leaf w; got ('a', 'b') for shape (8, 8). "
        "Map one of the leaf's logical axes to them.": ({"w": P("a", "b")}, ("a", "b"), ("w", (8, 8))),
    }.items(),
)
def test_rules_of_another_tree_are_refused(refusal, message):
    rules, axes, leaf = refusal
    with value_error(message):
        make_dim_chooser("tp", axes, rules)(*leaf)


@pytest.mark.parametrize("make", [sk.zero1, sk.zero2, sk.fsdp])
def test_logical_names_override_the_largest_dim(make):  # proves F54
    config = transformer.Config(vocabulary=64, layers=2, dim=16, heads=4, hidden=64)
    shapes = jax.eval_shape(lambda: transformer.init(jax.random.key(0), config))
    rules = dict.fromkeys(("layers", "vocabulary", "heads", "kv_heads", "head_size", "hidden")) | {"embed": "d"}
    specs = sk.specs_from_rules(transformer.logical_axes(config), rules)
    mesh = sk.abstract_mesh(d=4)
    found = make("d", min_size=1, rules=specs).layouts(shapes, mesh)
    assert found["layers"]["down"].update == P(None, None, "d")  # hidden, 64, would be the largest
    assert found["embed"].update == P(None, "d")
    assert found["layers"]["attention_norm"].update == P(None, "d")
    assert make("d", min_size=1).layouts(shapes, mesh)["layers"]["down"].update == P(None, "d")
    sk.describe(make("d", rules=specs), shapes, mesh)


# Such a leaf stayed whole without a word, or only the strategy that was asked split it.
@pytest.mark.check
def test_rules_that_name_an_axis_which_the_mesh_does_not_have():
    params = {"up": jax.ShapeDtypeStruct((8, 8), jnp.float32), "down": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    specs = {"up": P("fsdp", "model"), "down": P(("modle", "fsdp"))}
    for make, rules in ((sk.tp, {**specs, "down": P("modle")}), (partial(sk.fsdp, min_size=1), specs)):
        plan = make("model" if make is sk.tp else "fsdp", rules=rules)
        with value_error(
            f"{plan}: the rules may only name axes of the mesh, data=2, fsdp=2, model=2; they split leaf down over "
            "'modle'. Name those alone, also in the metadata behind them, or add the axis to make_mesh, as modle=1 if "
            "nothing is to be split over it."
        ):
            plan.layouts(params, sk.abstract_mesh(data=2, fsdp=2, model=2))
    plan.check(sk.abstract_mesh(fsdp=2, model=1, modle=1))


@jax.tree_util.register_dataclass
@dataclass
class Layer:
    """A module, which can be called."""

    up: object
    norm: object

    def __call__(self, x):
        raise AssertionError("a tree of specs is no function")


# It was called with a path and a shape.
@pytest.mark.check
def test_the_specs_of_a_module_that_can_be_called_are_a_tree():
    leaf, mesh = jax.ShapeDtypeStruct((8, 8), jnp.float32), sk.abstract_mesh(model=2, fsdp=2)
    specs = Layer(P("fsdp", "model"), P())
    plan = sk.chain(sk.tp("model", specs), sk.fsdp("fsdp", min_size=1, rules=specs))
    layouts = plan.layouts(Layer(leaf, leaf), mesh)
    assert (layouts.up.rest, layouts.norm.rest) == (P("fsdp", "model"), P())
