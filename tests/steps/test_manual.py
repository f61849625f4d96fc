"""Axes that a step leaves to XLA's partitioner: explicit ZeRO and pipelines around automatic tensor parallelism."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import schedules
from shardkit.analysis.hlo.differences import read_compiled
from support.commands import deep
from support.compilers import gpu, tpu
from support.pipelines import pipelined_grad
from support.refusals import type_error, value_error
from support.training import lenient

LAYERS, DIM, HIDDEN = 4, 8, 16
KEY = jax.random.key(0)
# What a tensor-parallel model for jit has: the columns of one matrix, the rows of the other.
SPECS = {"embed": P(), "layers": {"up": P(None, None, "model"), "down": P(None, "model")}, "bias": P("model")}
EACH = {"min_size": 1, "layerwise": ("layers",)}
BATCH = {"x": np.arange(16) % 6, "y": np.float32(np.random.default_rng(1).normal(size=(16, DIM)))}


def make_params():
    draw = np.random.default_rng(0).normal
    return {
        "embed": np.float32(draw(size=(6, DIM))),
        "layers": {
            "up": np.float32(0.3 * draw(size=(LAYERS, DIM, HIDDEN))),
            "down": np.float32(0.3 * draw(size=(LAYERS, HIDDEN, DIM))),
        },
        "bias": np.zeros(DIM, np.float32),
    }


def layer(weights, x):
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"]


def embed(params, batch, keys):
    return params["embed"][batch["x"]]


def stage(layers, x, keys):
    return sk.scan_layers(layer, layers, x)


def head(params, x, batch):
    return jnp.mean((x + params["bias"][None] - batch["y"]) ** 2)


def loss_fn(params, batch, keys):
    return head(params, stage(params["layers"], embed(params, batch, keys), keys), batch)


def built(mesh, plan, grad_fn=None, **options):
    grad_fn = grad_fn or sk.value_and_grad(loss_fn)
    return sk.make_train_step(grad_fn, lenient(optax.adamw(1e-2)), mesh=mesh, plan=plan, **options)


def trained(init, step, params):
    """Loss, parameters on the host and the last state after three steps, which keep every layout and compile once."""
    state = init(params, KEY)
    layouts = jax.tree.map(lambda x: x.sharding, state)
    for _ in range(3):
        state, metrics = step(state, BATCH)
        assert jax.tree.map(lambda x: x.sharding, state) == layouts
    return jax.device_get((metrics["loss"], state.params)), state


@pytest.fixture(scope="module")
def alone():
    return trained(*built(sk.make_mesh(jax.devices()[:1], data=1), sk.dp("data")), make_params())[0]


@pytest.mark.quick("AxisType.Explicit")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.optimized
def test_a_tensor_parallel_model_gets_explicit_fsdp(kind, alone):
    """Its weights are gathered over "fsdp" alone, in the parts that the partitioner made of them."""
    mesh = sk.make_mesh(data=2, fsdp=2, model=2, axis_types=(AxisType.Auto, AxisType.Auto, kind))
    init, step = built(mesh, sk.chain(sk.dp("data"), sk.fsdp("fsdp", **EACH)), manual=("data", "fsdp"))
    found, state = trained(init, step, sk.shard(make_params(), mesh, SPECS))
    chex.assert_trees_all_close(found, alone, rtol=1e-5, atol=1e-6)
    assert state.params["layers"]["up"].sharding.spec == P(None, "fsdp", "model")
    assert state.opt_state[0].mu["layers"]["down"].sharding.spec == P(None, "model", "fsdp")
    assert (jax.typeof(state.params["layers"]["up"]).sharding.spec[2] == "model") == (kind == AxisType.Explicit)

    rows = read_compiled(step.trace(state, BATCH), step.lower(state, BATCH).compile()).rows
    of_layers = [row for row in rows if row.axes == ("fsdp",) and row.bytes_out == 4 * DIM * HIDDEN // 2]
    assert {row.kind for row in of_layers} == {"all_gather"} and len(of_layers) == 4  # two weights, twice
    assert not [row for row in rows if row.kind == "all_gather" and row.bytes_out >= 4 * DIM * HIDDEN]


@pytest.mark.quick("plan1")
@pytest.mark.parametrize("plan", [sk.zero1("data", **EACH), sk.fsdp("data", min_size=1, gather=sk.algorithms.ring())])
@pytest.mark.optimized
def test_other_strategies_and_algorithms(plan, alone):
    mesh = sk.make_mesh(jax.devices()[:4], data=2, model=2)
    found, _ = trained(*built(mesh, plan, manual="data"), sk.shard(make_params(), mesh, SPECS))
    chex.assert_trees_all_close(found, alone, rtol=1e-5, atol=1e-6)


# Alone catches an algorithm that sends what the partitioner has split as if it were whole: twice the bytes.
@pytest.mark.parametrize("algorithm", [sk.algorithms.hierarchical("fsdp"), deep(sk.algorithms.ring())])
@pytest.mark.optimized
def test_an_algorithm_sends_the_parts_of_the_partitioner(algorithm, alone):
    mesh = sk.make_mesh(data=2, fsdp=2, model=2)
    plan = sk.fsdp(("data", "fsdp"), **EACH, gather=algorithm, reduce=algorithm)
    init, step = built(mesh, plan, manual=("data", "fsdp"))
    params = sk.shard(make_params(), mesh, SPECS)
    found, state = trained(init, step, params)
    chex.assert_trees_all_close(found, alone, rtol=1e-5, atol=1e-6)
    rows = read_compiled(step.trace(state, BATCH), step.lower(state, BATCH).compile()).rows
    largest = max(row.bytes_out for row in rows if row.kind in ("all_gather", "ppermute") and row.axes != ("model",))
    assert largest == 4 * DIM * HIDDEN // (2 if algorithm.name.startswith("hier") else 8)
    assert not [row for row in rows if row.kind == "all_gather" and row.axes == ("model",) and row.bytes_out > 4 * DIM]


@pytest.mark.parametrize("mode", [pytest.param("branch", marks=pytest.mark.deep), "masked"])
def test_a_pipeline_with_automatic_tensor_parallelism_inside(mode, alone):
    mesh = sk.make_mesh(stage=2, data=2, model=2)
    grad_fn = pipelined_grad(embed, stage, head, schedules.one_f_one_b(2, 4), "stage", mode=mode)
    init, step = built(mesh, sk.chain(sk.pp("stage"), sk.dp("data")), grad_fn, manual=("stage", "data"))
    found, state = trained(init, step, sk.shard(make_params(), mesh, SPECS))
    chex.assert_trees_all_close(found, alone, rtol=1e-5, atol=1e-6)
    assert state.params["layers"]["up"].sharding.spec == P("stage", None, "model")


def test_parameters_that_a_function_makes_and_their_evaluation():
    mesh = sk.make_mesh(jax.devices()[:4], data=2, model=2)
    plan = sk.fsdp("data", min_size=1)

    def make(key):
        params = jax.tree.map(jnp.asarray, make_params())
        return jax.lax.with_sharding_constraint(params, jax.tree.map(lambda s: jax.NamedSharding(mesh, s), SPECS))

    init, _ = built(mesh, plan, manual="data")
    state = init(make, KEY)
    assert state.params["layers"]["down"].sharding.spec == P("data", "model")
    whole = jax.jit(loss_fn, static_argnums=2)(make_params(), BATCH, None)
    evaluate = sk.make_eval_step(loss_fn, mesh=mesh, plan=plan, manual="data")
    np.testing.assert_allclose(evaluate(state.params, BATCH)["loss"], whole, rtol=1e-5)
    assert init.abstract(state.params).params["layers"]["down"].sharding == state.params["layers"]["down"].sharding


@pytest.mark.check
# Alone catches a description of a layout that the step would not have: the plan splits the dims that are left.
def test_a_plan_is_described_with_what_the_partitioner_splits(mesh2x4):  # proves F87
    shapes = {"bias": ((DIM,), P("model")), "up": ((DIM, HIDDEN), P("model"))}
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh2x4, spec))
        for name, (shape, spec) in shapes.items()
    }
    plan = sk.fsdp("data", min_size=1)
    assert sk.describe(plan, params, manual="data").splitlines() == [
        "leaf  shape    at rest               bytes/device  update                bytes/device  why",
        "bias  [8]      (('data', 'model'),)  4             (('data', 'model'),)  4             "
        "fsdp('data') splits dim 0; the partitioner splits dim 0 over 'model'",
        "up    [8, 16]  ('model', 'data')     64            ('model', 'data')     64            "
        "fsdp('data') splits dim 1; the partitioner splits dim 0 over 'model'",
        "fsdp('data'): 68 bytes per device at rest, 68 per gradient or optimizer moment",
    ]
    init, _ = built(mesh2x4, plan, manual="data")
    assert init.abstract(params).params["up"].sharding.spec == P("model", "data")
    assert "the partitioner" not in sk.describe(plan, params)
    with pytest.raises(ValueError, match=r"^describe: manual must name every axis of the plan; got 'model' for fsdp"):
        sk.describe(plan, params, manual="model")
    with type_error("describe: manual must come with a plan; got manual='data' without one. Leave it out."):
        sk.describe(params, manual="data")


@pytest.mark.check
@pytest.mark.parametrize(
    "message, manual",
    {
        "make_train_step: manual must name every axis of the plan; got 'data' for fsdp('model') + dp('data'). Add "
        "'model' to manual, or leave it out of the plan, so that the partitioner splits arrays over it.": "data",
        "make_train_step: manual must name axes of the mesh; got 'x'; its axes are data=2, model=4. Use some of "
        "them, or leave manual out, which means all.": ("data", "model", "x"),
    }.items(),
)
def test_mistakes_are_one_sentence(manual, message, mesh2x4):
    with value_error(message):
        built(mesh2x4, sk.chain(sk.dp("data"), sk.fsdp("model")), manual=manual)


@pytest.mark.check
def test_groups_need_all_axes(mesh2x4):
    with value_error(
        "make_train_step: deterministic=2 needs every axis of the mesh to be Manual; got manual='data'. Leave manual "
        "out, or deterministic."
    ):
        built(mesh2x4, sk.dp("data"), manual="data", deterministic=2)


@pytest.mark.deep
@pytest.mark.parametrize("topology", [pytest.param("v5e:2x4", marks=tpu), pytest.param("h100:1x1x8", marks=gpu)])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_chips_send_what_is_written(kind, topology):
    """Beside it only the activations that the partitioner sums, at the line of the layer."""
    mesh = AbstractMesh((2, 2, 2), ("data", "fsdp", "model"), axis_types=(AxisType.Auto, AxisType.Auto, kind))
    grad_fn = sk.value_and_grad(lambda params, x, keys: jnp.mean(stage(params["layers"], x, keys) ** 2))
    plan = sk.chain(sk.dp("data"), sk.fsdp("fsdp", **EACH))
    init, step = built(mesh, plan, grad_fn, precision="bf16", manual=("data", "fsdp"))

    def described(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    shapes = {"up": (LAYERS, 512, 2048), "down": (LAYERS, 2048, 512)}
    params = {"layers": {name: described(shape, SPECS["layers"][name]) for name, shape in shapes.items()}}
    batch = described((64, 512), P(("data", "fsdp")))
    report = sk.aot.compile(step, (init.abstract(params), batch), topology=topology, mesh=mesh)
    added = [line for line in report.differences() if not line.startswith("merged: ")]
    assert len(added) == 1 and "all_reduce over 'model'" in added[0] and "test_manual.py" in added[0]
    assert {row.kind for row in report.rows if row.axes == ("model",)} == {"all_reduce"}
