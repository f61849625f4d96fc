"""Non-finite triage: leaf, coordinates, number and first index of what is planted, before the devices are summed."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.runtime.data.arrays import from_full
from shardkit.runtime.triage import NonFinite, TriageReport, nonfinite, observations, triage
from shardkit.steps.step import NonFiniteError
from support import pipelines
from support.commands import deep
from support.refusals import type_error

WAYS = [("dp", {}), ("fsdp", {"accumulate": 2}), ("padded", {"precision": "bf16"})]
WAYS += [("zero1", {"precision": sk.Precision(compute=jnp.float16, loss_scale=8.0)})]


def loss_fn(params, batch, keys):
    h = sk.dropout(jnp.tanh(batch["x"] @ params["w"]), keys, 0.1)
    values = jnp.sum((h - params["b"][None]) ** 2, -1) + jnp.log(batch["y"])
    return sk.Mean.of(values, batch["weight"]), {"size": sk.Mean.of(jnp.abs(h))}


GRAD_FN = sk.value_and_grad(loss_fn)


def make_params():
    return {"b": jnp.ones(6), "w": jax.random.normal(jax.random.key(0), (8, 6))}


def make_batch(rows=32):
    rng = np.random.default_rng(0)
    return {
        "id": np.arange(rows, dtype=np.int32),
        "weight": rng.integers(1, 5, rows).astype(np.float32),
        "x": rng.normal(size=(rows, 8)).astype(np.float32),
        "y": rng.uniform(1, 2, rows).astype(np.float32),
    }


def built(mesh, plan, **options):
    init, step = sk.make_train_step(GRAD_FN, optax.sgd(0.1), mesh=mesh, plan=plan, **options)
    options.pop("nonfinite", None)
    return init(make_params(), jax.random.key(1)), step, triage(GRAD_FN, mesh=mesh, plan=plan, **options)


def plans(mesh):
    return {
        "dp": sk.dp(("data", "model")),
        "fsdp": sk.chain(sk.dp("data"), sk.fsdp("model", min_size=1)),
        "padded": sk.chain(sk.dp("data"), sk.fsdp("model", min_size=1, uneven="pad")),
        "zero1": sk.zero1(("data", "model"), min_size=1),
    }


# proves S123: keys, dropout, precision and accumulation are those of the step, so the loss is the step's
@pytest.mark.quick("fsdp-options1")
@pytest.mark.parametrize(("plan", "options"), WAYS)
def test_a_finite_step_is_repeated_exactly(plan, options, mesh2x4):
    state, step, run = built(mesh2x4, plans(mesh2x4)[plan], **options)
    report = run(state, make_batch())
    _, metrics = step(state, make_batch())
    assert report.rows == () and report.example is None
    assert (report.loss, report.weight) == (float(metrics["loss"]), float(metrics["weight"]))
    assert str(report) == (
        f"loss {report.loss:g}, weight {report.weight:g}\nall values are finite before the cross-device reduction"
    )


# proves S123: after the step every gradient is NaN on every device; before the sum one device has it
@pytest.mark.quick("padded")
@pytest.mark.parametrize("plan", ["fsdp", "padded", deep("dp"), deep("zero1")])
def test_an_example_that_is_not_finite_is_named(plan, mesh2x4):
    state, step, run = built(mesh2x4, plans(mesh2x4)[plan])
    batch = make_batch()
    batch["x"][21, 3] = np.nan  # row 21 of 32 over 8 devices: device 5, at data=1, model=1
    at = {"data": 1, "model": 1}
    report = run(state, batch)
    assert report.rows == (
        NonFinite("batch.x", at, 1, (21, 3)),
        NonFinite("means.loss.total", at, 1, ()),
        NonFinite("means.size.total", at, 1, ()),
        NonFinite("grads.b", at, 6, (0,)),
        NonFinite("grads.w", at, 48, (0, 0)),
    )
    assert report.example == 21 and math.isnan(report.loss)
    assert str(report) == (
        f"loss nan, weight {report.weight:g}\n"
        "not finite before the cross-device reduction:\n"
        "leaf              where            values  first\n"
        "batch.x           data=1, model=1  1       [21, 3]\n"
        "means.loss.total  data=1, model=1  1\n"
        "means.size.total  data=1, model=1  1\n"
        "grads.b           data=1, model=1  6       [0]\n"
        "grads.w           data=1, model=1  48      [0, 0]\n"
        "first example of the batch with such a value: 21"
    )
    state, _ = step(state, batch)
    assert all(np.isnan(x).all() for x in jax.tree.leaves(sk.unpadded(state.params)))


# proves S123: the partitioner's parts are one: the index is that of the whole leaf, the place along Manual axes alone
@pytest.mark.parametrize("kind", [AxisType.Auto, deep(AxisType.Explicit)])
def test_a_step_with_axes_left_to_the_partitioner_is_inspected_too(kind):
    mesh = sk.make_mesh(jax.devices()[:4], data=2, model=2, axis_types=(AxisType.Auto, kind))
    plan, whole = sk.fsdp("data", min_size=1), make_params()
    init, step = sk.make_train_step(GRAD_FN, optax.sgd(0.1), mesh=mesh, plan=plan, manual="data")
    run = triage(GRAD_FN, mesh=mesh, plan=plan, manual="data")
    state, batch = (
        init(sk.shard(whole, mesh, {"b": P("model"), "w": P(None, "model")}), jax.random.key(1)),
        make_batch(),
    )
    weights = np.array(whole["w"])
    weights[6, 4] = np.inf
    broken = jax.tree.map(jnp.copy, state)  # the step donates the other
    broken.params["w"] = jax.device_put(weights, broken.params["w"].sharding)
    report, loss = run(state, batch), step(state, batch)[1]["loss"]
    assert report.rows == () and report.loss == float(loss)
    batch["x"][21, 3] = np.nan
    rows = run(broken, batch).rows
    assert rows[:2] == (NonFinite("params.w", {"data": 1}, 1, (6, 4)), NonFinite("batch.x", {"data": 1}, 1, (21, 3)))
    assert NonFinite("grads.w", {"data": 1}, 48, (0, 0)) in rows


# proves S123: made by the loss from a finite batch, on two devices
def test_what_the_loss_makes_is_named_too(data8):
    state, _, run = built(data8, sk.dp("data"))
    batch = make_batch()
    batch["y"][[9, 30]] = -1, 0  # log: NaN, -inf; no gradient goes there
    report = run(state, batch)
    assert [(row.path, row.coordinates) for row in report.rows] == [
        ("means.loss.total", {"data": 2}),
        ("means.loss.total", {"data": 7}),
    ]
    assert report.example is None


# proves S123: a parameter, where it is held and where its copies are
@pytest.mark.quick("fsdp")
@pytest.mark.parametrize("plan", ["dp", "fsdp"])
def test_a_parameter_that_is_not_finite(plan, mesh2x4):
    state, _, run = built(mesh2x4, plans(mesh2x4)[plan])
    params = make_params()
    params["w"] = params["w"].at[5, 2].set(jnp.inf)
    placed = from_full(params, mesh2x4, jax.tree.map(lambda x: x.sharding.spec, state.params))
    report = run(state._replace(params=placed), make_batch())
    assert report.rows[0] == NonFinite("params.w", {} if plan == "dp" else {"model": 2}, 1, (5, 2))
    assert "params.w" in str(report) and ("everywhere" in str(report)) == (plan == "dp")


def test_weights_that_sum_to_zero_and_a_loss_scale_that_overflows(data8):
    state, _, run = built(data8, sk.dp("data"))
    report = run(state, {**make_batch(), "weight": np.zeros(32, np.float32)})
    assert report.rows == () and report.loss == 0
    assert str(report).splitlines()[:2] == [
        "loss 0, weight 0",
        "the weights of all examples sum to 0, so all gradients are 0",
    ]
    # proves S123: float16 gradients overflow with the loss scale in them
    state, _, run = built(data8, sk.dp("data"), precision=sk.Precision(compute=jnp.float16, loss_scale=64.0))
    batch = make_batch()
    batch["weight"][4:8] = 2000
    assert {(row.path, row.coordinates["data"]) for row in run(state, batch).rows} == {("grads.b", 1), ("grads.w", 1)}


# proves S123: the state of a NonFiniteError, with the step that it counts taken back, draws the same dropout
def test_after_a_step_that_stopped(data8):
    state, step, run = built(data8, sk.dp("data"), nonfinite="stop")
    batch = make_batch()
    batch["y"][11] = -1
    before = run(state, batch)
    with pytest.raises(NonFiniteError) as error:
        step(state, batch)
    stopped = error.value.state
    assert run(stopped._replace(step=stopped.step - 1), batch).rows == before.rows
    assert [row.coordinates for row in before.rows] == [{"data": 2}]


# proves S123
def test_a_pipeline():
    mesh, plan = sk.make_mesh(data=4, stage=2), sk.chain(sk.dp("data"), sk.pp("stage"))
    schedule = sk.schedules.lockstep(devices=2, microbatches=2)
    grad_fn = pipelines.pipelined_grad(*pipelines.PIECES, schedule, "stage", layer_numbers=True)
    init, _ = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=plan)
    state = init(pipelines.make_params(4), jax.random.key(0))
    run, batch = triage(grad_fn, mesh=mesh, plan=plan), pipelines.make_batch(16)
    assert run(state, batch).rows == ()
    batch["weights"][14] = np.inf, np.nan
    report = run(state, batch)
    assert report.rows[0] == NonFinite("batch.weights", {"data": 3}, 2, (14, 0))
    assert {row.coordinates.get("data") for row in report.rows} == {3}
    assert {row.path for row in report.rows} >= {"means.loss.total", "grads.layers.w", "grads.gain"}


def test_nonfinite_of_any_tree(mesh2x4):
    w = np.zeros((4, 8), np.float32)
    w[1, 6:] = np.nan, np.inf
    w[2, 7] = -np.inf
    tree = {"w": w, "ok": np.ones(3), "n": 3, "key": jax.random.key(0), "s": np.float32(np.nan), "e": np.zeros((0, 2))}
    specs = {name: P("data", "model") if name == "w" else P() for name in tree}
    placed = from_full(tree, mesh2x4, specs)
    assert nonfinite(placed) == [
        NonFinite("s", {}, 1, ()),
        NonFinite("w", {"data": 0, "model": 3}, 2, (1, 6)),
        NonFinite("w", {"data": 1, "model": 3}, 1, (2, 7)),
    ]
    assert nonfinite({"n": placed["n"]}) == nonfinite({}) == []
    with type_error(
        "nonfinite: every leaf must be an array over one mesh; leaf w is a ndarray. Create it with from_full(tree, "
        "mesh, spec), or remove it from the tree."
    ):
        nonfinite({"w": w})


def test_a_long_report_is_cut(data8):
    rows = tuple(NonFinite(f"params.w{i}", {"data": 1}, 1, (0,)) for i in range(50))
    lines = str(TriageReport(rows, 1.0, 2.0)).splitlines()
    assert lines[0] == "loss 1, weight 2" and len(lines) == 3 + 40 + 1 and lines[-1] == "and 10 more"


def test_the_costs_are_those_of_the_census(mesh2x4):
    state, _, run = built(mesh2x4, sk.dp(("data", "model")))
    report = sk.census(run, state, make_batch())
    means = {"loss": 2, "size": 2}
    ranks = [1, 2, *([0] * sum(means.values())), *(x.ndim for x in make_batch().values() if x.dtype != np.int32), 1, 2]
    assert report.count() == 2
    assert report.sent(kind="all_gather") == sum(4 * (1 + rank) for rank in ranks) * 7
    assert report.sent(kind="all_reduce") == 2 * 8 * len(means) * 7 / 8
    tree = [sk.shard(jnp.ones(shape), mesh2x4, P()) for shape in [(3,), (2, 4), ()]]
    report = sk.census(lambda leaves: observations(leaves, mesh=mesh2x4, specs=(P(), P(), P())), tree)
    assert report.count() == 1 and report.sent() == 4 * (2 + 3 + 1) * 7
