"""What the lint says of layouts: leaves that nobody annotated, pieces that are too small, and pmap."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.analysis import lint

MESH = sk.abstract_mesh(data=2, model=16)
X = jax.ShapeDtypeStruct((8, 64), jnp.float32)
PARAMS = {
    "layers": [
        {"up": jax.ShapeDtypeStruct((64, 64), jnp.float32), "down": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    ],
    "gain": jax.ShapeDtypeStruct((64,), jnp.float32),
}
NAMES = {"layers": [{"up": ("embed", "hidden"), "down": ("hidden", "embed")}], "gain": ("embed",)}
RULES = {"embed": None, "hidden": "model"}


def step(specs):
    """A forward pass over parameters that are laid out as the specs say."""

    def forward(params, x):
        used = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params))
        return sk.vary(used * jnp.sum(x), ("data", "model"))[None]

    return jax.shard_map(forward, mesh=MESH, in_specs=(specs, P("data")), out_specs=P(("data", "model")))


def unannotated(specs, **options):
    found = [each for each in lint(step(specs), PARAMS, X, **options) if each.rule == "large-replicated"]
    assert all("specs_from_rules" in each.remedy for each in found)  # logical names are what it advises
    return sorted(each.message.split(",")[0] for each in found)


# proves S127: by name, and no others
@pytest.mark.check
def test_leaves_without_annotation_are_listed():
    whole = jax.tree.map(lambda _: P(), PARAMS)
    assert unannotated(whole, large=1024) == ["params['layers'][0]['down']", "params['layers'][0]['up']"]
    assert unannotated(whole, large=1) == ["params['gain']", "params['layers'][0]['down']", "params['layers'][0]['up']"]
    named = sk.specs_from_rules(NAMES, RULES)
    assert unannotated(named, large=1024) == []
    forgotten = {**named, "layers": [{**named["layers"][0], "down": P()}]}
    assert unannotated(forgotten, large=1024) == ["params['layers'][0]['down']"]


# proves S125 in part: nothing warns of tensor parallelism where data parallelism fits
@pytest.mark.check
def test_pmap_and_pieces_that_are_too_small():
    def rules_of(fn, *args, **options):
        return {each.rule for each in lint(fn, *args, **options)}

    def gathered(dim):
        kernel = partial(sk.all_gather, axis="model", replicated=True)
        fn = jax.shard_map(kernel, mesh=MESH, in_specs=P("model"), out_specs=P())
        return fn, jax.ShapeDtypeStruct((dim,), jnp.float32)

    assert rules_of(*gathered(16 * 255)) == {"tiny-shards"}
    assert rules_of(*gathered(16 * 256)) == set()
    assert rules_of(*gathered(16 * 256), small=2048) == {"tiny-shards"}

    def behind_a_barrier(x):
        return sk.all_gather(jax.lax.optimization_barrier((x * 2, x))[1], "model", replicated=True)

    fn = jax.shard_map(behind_a_barrier, mesh=MESH, in_specs=P("model"), out_specs=P())
    assert rules_of(fn, jax.ShapeDtypeStruct((16 * 255,), jnp.float32)) == {"tiny-shards"}
    old = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")
    assert rules_of(old, jax.ShapeDtypeStruct((8, 4), jnp.float32)) == {"pmap"}
