"""What the lint says of layouts: leaves that nobody annotated, pieces that are too small, and pmap."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.analysis import lint

pytestmark = pytest.mark.check
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
TP = sk.tp("model", {"up": P(None, "model"), "down": P("model")})


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
def test_leaves_without_annotation_are_listed():
    whole = jax.tree.map(lambda _: P(), PARAMS)
    assert unannotated(whole, large=1024) == ["params['layers'][0]['down']", "params['layers'][0]['up']"]
    assert unannotated(whole, large=1) == ["params['gain']", "params['layers'][0]['down']", "params['layers'][0]['up']"]
    named = sk.specs_from_rules(NAMES, RULES)
    assert unannotated(named, large=1024) == []
    forgotten = {**named, "layers": [{**named["layers"][0], "down": P()}]}
    assert unannotated(forgotten, large=1024) == ["params['layers'][0]['down']"]


# proves S125: the first two of its three; the third below
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


def trained(plan, sequence=False):
    """A training step of a block of two matrices, whose split is that of tensor parallelism if the plan has one."""
    inside = "model" if "tp" in str(plan) else None

    def loss_fn(params, batch, keys):
        if inside is None:
            return jnp.mean(jnp.tanh(batch @ params["up"]) @ params["down"])
        hidden = jnp.tanh(sk.layers.column_linear(batch, params["up"], axis=inside))
        return jnp.mean(sk.layers.row_linear(hidden, params["down"], axis=inside))

    init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(0.1), mesh=MESH, plan=plan)
    params = {name: jax.ShapeDtypeStruct((256, 256), jnp.float32) for name in ("up", "down")}
    return step, init.abstract(params), jax.ShapeDtypeStruct((64, 256), jnp.float32)


# proves S125: and silent for every plan that needs its axis, and where the memory is not enough or not known
def test_tensor_parallelism_of_what_one_device_could_hold():
    needed = 3 * 2 * 4 * 256**2  # parameters, their gradients, and room for the batch

    def found(plan, **options):
        return lint(*trained(plan), ignore=("tiny-shards", "idle-axis"), **options)

    (finding,) = found(sk.chain(sk.dp("data"), TP), memory=needed)
    assert finding.rule == "tensor-parallel-that-fits" and "test_lint_layout.py" in finding.source
    held = 2 * 2 * 4 * 256**2 + 64 * 256 * 4
    assert finding.message.startswith("2 arrays are split over 'model' of 16 devices, which sum activations, but all ")
    assert int(re.search(r"with gradients ([\d,]+) bytes", finding.message)[1].replace(",", "")) - held in range(200)
    assert not found(sk.chain(sk.dp("data"), TP), memory=held - 1) and not found(sk.chain(sk.dp("data"), TP))
    for plan in (sk.dp("model"), sk.fsdp("model", min_size=1), sk.zero1("model", min_size=1)):
        assert not found(plan, memory=needed)
