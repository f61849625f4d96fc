"""Where arrays lie: before and after they are placed, as a picture, and as the parameters' own metadata says."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk


# proves S31, S17: what describe says is what jax knows
def test_before_and_after(mesh2x4):
    x = jnp.ones((8, 4))
    assert x.devices() == {jax.devices()[0]}
    placed = sk.shard({"w": x, "n": np.zeros(3, np.int32)}, mesh2x4, {"w": P("data", "model"), "n": P()})
    assert placed["w"].devices() == set(jax.devices()) and placed["w"].sharding.mesh == mesh2x4
    before, after = sk.describe({"w": x}).splitlines()[1], sk.describe(placed).splitlines()[1:3]
    assert before.split("  ")[0] == "w" and [c.strip() for c in before.split("  ") if c][3:] == [
        "one device", "8x4", "1", "128"
    ]  # fmt: skip
    assert [[c.strip() for c in line.split("  ") if c] for line in after] == [
        ["n", "3", "int32", "P()", "3", "8", "12"],
        ["w", "8x4", "float32", "P('data', 'model')", "4x1", "8", "16"],
    ]


def picture(x, capsys):
    """The names in jax's picture, row by row."""
    jax.debug.visualize_array_sharding(x, use_color=False)
    return [name for line in capsys.readouterr().out.splitlines() if (name := line.strip(" │")).startswith("CPU")]


# proves S37: one axis, and two of which one does not split the array, so that rows are held four times
def test_the_picture_of_an_arrays_pieces(mesh2x4, capsys):
    pytest.importorskip("rich")
    four = sk.make_mesh(jax.devices()[:4], a=4)
    assert picture(sk.shard(np.zeros((8, 4)), four, P("a")), capsys) == ["CPU 0", "CPU 1", "CPU 2", "CPU 3"]
    x = np.zeros((8, 4))
    assert picture(sk.shard(x, mesh2x4, P("data")), capsys) == ["CPU 0,1,2,3", "CPU 4,5,6,7"]
    assert picture(sk.shard(x, mesh2x4, P("model")), capsys) == [f"CPU {i},{i + 4}" for i in range(4)]
    assert picture(sk.shard(x, mesh2x4, P()), capsys) == ["CPU 0,1,2,3,4,5,6,7"]


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


# proves F87: with what test_inspection.py says of values inside shard_map
def test_arrays_of_more_than_two_dims_are_described():
    mesh = sk.make_mesh(a=2, b=2, c=2)
    tree = {"x": np.zeros((2, 4, 6, 3), np.float32), "deep": [np.zeros((4, 2, 2, 2, 2), np.int8)]}
    placed = sk.shard(tree, mesh, {"x": P("c", None, ("a",)), "deep": P(("a", "b"), None, "c")})
    assert sk.describe(placed) == (
        "leaf    global     dtype    spec                      local      devices  bytes/device\n"
        "deep.0  4x2x2x2x2  int8     P(('a', 'b'), None, 'c')  1x2x1x2x2  8        8\n"
        "x       2x4x6x3    float32  P('c', None, 'a')         1x4x3x3    8        144\n"
        "2 leaves, 152 bytes on each device"
    )
