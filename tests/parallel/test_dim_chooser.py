"""Which dim a strategy splits, from a function or from a tree of specs."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.models import transformer
from shardkit.parallel.rules import dim_chooser

SPECS = {"embed": P(None, "d"), "layers": {"up": P(None, None, ("t", "d")), "gain": P()}}


def test_the_dim_is_the_one_on_which_the_axis_stands():
    choose = dim_chooser("fsdp", ("d",), SPECS)
    assert choose("embed", (8, 8)) == 1
    assert choose("layers.up", (2, 8, 8)) == 2
    assert choose("layers.gain", (2, 8)) is None
    assert dim_chooser("fsdp", ("t", "d"), SPECS)("layers.up", (2, 8, 8)) == 2


def test_a_function_is_taken_as_it_is():
    rule = lambda path, shape: 1  # noqa: E731
    assert dim_chooser("fsdp", ("d",), rule) is rule


@pytest.mark.parametrize(
    "rules, axes, leaf, kind, message",
    [
        (
            SPECS,
            ("d",),
            ("layers.down", (2, 8, 8)),
            ValueError,
            "tp: the rules have no spec for leaf layers.down; they are of another tree, with the leaves 'embed', "
            "'layers.gain', 'layers.up'. Make them from the logical axes of these parameters.",
        ),
        (
            SPECS,
            ("d",),
            ("embed", (8,)),
            ValueError,
            "tp: the rules must put axis 'd' on one dim of leaf embed; got (None, 'd') for shape (8,). "
            "Correct the logical axes or their rules.",
        ),
        (
            {"w": P("a", "b")},
            ("a", "b"),
            ("w", (8, 8)),
            ValueError,
            "tp: the rules must put axes 'a', 'b' on one dim of leaf w; got ('a', 'b') for shape (8, 8). "
            "Correct the logical axes or their rules.",
        ),
        (
            {"w": "d"},
            ("d",),
            ("w", (8, 8)),
            TypeError,
            "tp: rules must be a function of path and shape, or a tree of PartitionSpecs; got 'd' for w. "
            "Make the tree with specs_from_rules.",
        ),
    ],
)
def test_rules_of_another_tree_are_refused(rules, axes, leaf, kind, message):
    with pytest.raises(kind) as error:
        dim_chooser("tp", axes, rules)(*leaf)
    assert str(error.value) == message


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
    sk.describe(make("d", rules=specs), jax.tree.map(lambda x: jnp.zeros(x.shape), shapes), mesh)
