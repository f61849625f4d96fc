"""State that is carried and not differentiated: statistics of batches, averaged parameters, the bias of a router."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import schedules
from shardkit.on_device.microbatches import Microbatches
from shardkit.steps.carry import Carried
from support import pipelines
from support.layouts import mesh_of
from support.refusals import refused, value_error
from support.trees import assert_laid_out

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
D, F, LAYERS, STEPS = 6, 8, 2, 3
PARAMS = {
    "inner": RNG.normal(size=(D, F)).astype("f") * 0.3,
    "layers": {"w": RNG.normal(size=(LAYERS, F, F)).astype("f") * 0.2},
}
# Weights that differ between devices and microbatches: a mean of means would be wrong.
BATCHES = [
    {"x": RNG.normal(size=(24, D)).astype("f"), "weight": RNG.integers(0, 4, 24).astype("f")} for _ in range(STEPS)
]


def forward(params, x, whole):
    h = whole(x @ params["inner"])
    return sk.scan_layers(lambda layer, h: jnp.tanh(h @ whole(layer["w"])), params["layers"], h), h.astype(jnp.float32)


def loss_of(whole):
    """A loss beside a teacher, on normalized activations; `whole` gathers what a plan splits."""

    def loss_fn(params, batch, keys, carried):
        y, h = forward(params, batch["x"], whole)
        teacher, _ = forward(carried["teacher"], batch["x"], whole)
        normal = (h - carried["mean"][None]) * jax.lax.rsqrt(carried["variance"] + 1e-3)[None]
        weight = batch["weight"]
        sums = {"mean": jnp.sum(h * weight[:, None], 0), "square": jnp.sum(h**2 * weight[:, None], 0)}
        each = jnp.sum((y.astype(jnp.float32) - teacher.astype(jnp.float32) + 0.1 * normal) ** 2, 1)
        loss = sk.Mean.of(each, weight)
        busy = sk.Mean(jnp.sum(h > 0, 0), jnp.full(F, len(weight)))  # an integer count and weight for each element
        return loss, {"statistics": sk.Mean(sums, jnp.sum(weight)), "busy": busy}

    return loss_fn


def first(params):
    return {
        "teacher": jax.tree.map(lambda x: x / 2, params),
        "mean": jnp.zeros(F),
        "variance": jnp.ones(F),
        "bias": jnp.zeros(F),
    }


def carry(old, metrics, params):
    mix = lambda old, new: 0.9 * old + 0.1 * new  # noqa: E731
    found = metrics["statistics"]
    return {
        "teacher": optax.incremental_update(params, old["teacher"], 0.1),
        "mean": mix(old["mean"], found["mean"]),
        "variance": mix(old["variance"], found["square"] - found["mean"] ** 2),
        "bias": old["bias"] + 0.1 * jnp.sign(jnp.mean(metrics["busy"]) - metrics["busy"]),
    }


@pytest.fixture(scope="module")
def wanted():
    """Plain jax on one device: metrics and carried state after each step, and the parameters at the end."""
    loss_fn, optimizer = loss_of(lambda x: x), optax.sgd(0.1, momentum=0.9)
    params, carried, out = PARAMS, first(PARAMS), []
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, opt_state, carried, batch):
        def mean(params):
            (total, weight), aux = loss_fn(params, batch, None, carried)
            return total / weight, aux

        (loss, aux), grads = jax.value_and_grad(mean, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        sums, weight = aux["statistics"]
        busy = jnp.divide(*map(jnp.float32, aux["busy"]))
        metrics = {"statistics": jax.tree.map(lambda x: x / weight, sums), "busy": busy}
        return params, opt_state, carry(carried, metrics, params), {"loss": loss, **metrics}

    for batch in BATCHES:
        params, opt_state, carried, metrics = step(params, opt_state, carried, batch)
        out.append(jax.device_get((metrics, carried)))
    return out, jax.device_get(params)


LAYERED = sk.fsdp("data", layerwise=("layers",), min_size=1)
SPLIT = {"inner": P(None, "model"), "layers": {"w": P(None, None, "model")}}
GATHERED = loss_of(lambda x: sk.all_gather(x, "model", dim=-1, replicated=True))
ROWS = {  # mesh, plan, accumulate
    "one": ({"data": 1}, sk.dp("data"), 2),
    "fsdp-layerwise": ({"data": 4}, LAYERED, 2),
    "dp-tp": ({"data": 2, "model": 2}, sk.chain(sk.dp("data"), sk.tp("model", SPLIT)), 1),
}
DEEP = {
    "dp": ({"data": 4}, sk.dp("data"), 1),
    "dp-twice": ({"data": 4}, sk.dp("data"), 2),
    "zero1": ({"data": 4}, sk.zero1("data"), 2),
    "zero2-layerwise": ({"data": 4}, sk.zero2("data", layerwise=("layers",), min_size=1), 2),
    "fsdp-padded": ({"data": 2, "fsdp": 3}, sk.chain(sk.dp("data"), sk.fsdp("fsdp", min_size=1, uneven="pad")), 1),
}
W = {"w": np.ones(2, "f")}


def step_of(row, **options):
    sizes, plan, accumulate = row
    mesh, grad_fn = mesh_of(**sizes), sk.value_and_grad(GATHERED if "model" in sizes else loss_of(lambda x: x))
    options = {"accumulate": accumulate, "carry": carry} | options
    return sk.make_train_step(grad_fn, optax.sgd(0.1, momentum=0.9), mesh=mesh, plan=plan, **options)


def check_close(got, wanted, tolerance=2e-5):
    got = jax.device_get(sk.unpadded(got))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance / 10), got, wanted)


# Catches statistics of one device or microbatch, a mean of means, a teacher that is not gathered with the parameters,
# an update from old parameters, and carried state in another layout than `init.abstract` says.
# proves N7
@pytest.mark.quick("fsdp-layerwise", "dp-tp")
@pytest.mark.parametrize("row", (ROWS | DEEP).values(), ids=ROWS | DEEP)
def test_it_is_the_same_on_every_mesh_and_for_every_accumulation(row, wanted):
    init, step = step_of(row)
    described = init.abstract(PARAMS, carried=first).carried
    state = init(PARAMS, KEY, carried=first)
    assert_laid_out(state.carried, described)
    for batch, (metrics, carried) in zip(BATCHES, wanted[0], strict=True):
        state, got = step(state, batch)
        assert_laid_out(state.carried, described)  # else a step compiles twice
        check_close({name: got[name] for name in metrics}, metrics)
        check_close(state.carried, carried)
    check_close(state.params, wanted[1])
    assert jax.tree.leaves(state.carried["teacher"])[0].sharding == jax.tree.leaves(state.params)[0].sharding


# Catches state that a checkpoint or a change of plans leaves out, or that is laid out as before.
def test_it_goes_on_after_a_restart_on_another_mesh_and_moves_between_plans(tmp_path, wanted):
    init, step = step_of(ROWS["fsdp-layerwise"])
    state, _ = step(init(PARAMS, KEY, carried=first(PARAMS)), BATCHES[0])
    with sk.runtime.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        checkpoints.wait()
        init, step = step_of(ROWS["dp-tp"])
        restored, _ = checkpoints.restore(init.abstract(PARAMS, carried=first))
    restored, metrics = step(restored, BATCHES[1])
    check_close(metrics["statistics"], wanted[0][1][0]["statistics"])
    check_close(restored.carried, wanted[0][1][1])

    moves = str(sk.reshard_steps(state, LAYERED, sk.dp("data"), mesh=mesh_of(data=4)))
    assert [line.split()[0] for line in moves.splitlines() if line.startswith("carried") and "all_gather" in line] == [
        "carried.teacher.inner",
        "carried.teacher.layers.w",
    ]


# Catches an evaluation without the state, or with another one than a step reads.
def test_an_evaluation_reads_it(wanted):
    loss_fn = loss_of(lambda x: x)
    evaluate = sk.make_eval_step(loss_fn, mesh=mesh_of(data=4), plan=LAYERED)
    state = step_of(ROWS["fsdp-layerwise"])[0](PARAMS, KEY, carried=first)
    metrics = evaluate(state.params, BATCHES[0], state.carried)
    check_close({name: metrics[name] for name in wanted[0][0][0]}, wanted[0][0][0])


# Catches a triage that runs another loss than the step, or that does not look at what the loss reads.
def test_a_value_in_it_that_is_not_finite_is_found():
    options = {"mesh": mesh_of(data=2), "plan": sk.dp("data")}
    grad_fn = sk.value_and_grad(reading)
    state = sk.make_train_step(grad_fn, optax.sgd(0.1), **options)[0](W, KEY, carried={"shift": np.nan})
    triage = sk.runtime.triage(grad_fn, **options)
    assert [row.path for row in triage(state, np.ones((4, 2), "f")).rows] == ["carried.shift", "means.loss.total"]
    with value_error("triage: the loss takes carried state, and there is none. Pass init(params, key, carried=...)."):
        triage(state._replace(carried=None), np.ones((4, 2), "f"))


# Catches running statistics that are rounded to the compute dtype, or a teacher that is not.
@pytest.mark.check
def test_what_mirrors_a_parameter_is_computed_as_that():
    seen = {}

    def loss_fn(params, batch, keys, carried):
        seen.update(carried)
        return jnp.mean(batch @ params["w"]), {"each": sk.Mean(jnp.sum(batch, 0, dtype=jnp.float32), len(batch))}

    made = sk.make_train_step(
        sk.value_and_grad(loss_fn), optax.sgd(0.1), mesh=sk.abstract_mesh(data=4), plan=sk.dp("data"), precision="bf16"
    )
    params = {"w": np.ones((2, 2), "f")}
    state = made.init.abstract(params, carried={"teacher": params, "mean": np.ones(3, "f"), "count": 0})
    _, metrics = jax.eval_shape(made.step, state, np.ones((8, 2), "f"))
    assert seen["teacher"]["w"].dtype == jnp.bfloat16
    assert (seen["mean"].dtype, seen["count"].dtype) == (jnp.float32, jnp.int32)
    assert metrics["each"].shape == (2,)


# Catches an update that is taken although its step is skipped.
def test_a_step_that_is_not_finite_keeps_it():
    grad_fn = sk.value_and_grad(lambda params, batch, keys: jnp.mean(batch * params["w"]))
    options = {"mesh": mesh_of(data=2), "carry": lambda old, metrics, params: {"steps": old["steps"] + 1}}
    init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), plan=sk.dp("data"), nonfinite="skip", **options)
    state = init({"w": jnp.float32(1)}, KEY, carried={"steps": 0})
    counts = []
    for value in (1.0, np.inf, 1.0):
        state, _ = step(state, np.full(2, value, "f"))
        counts.append(int(state.carried["steps"]))
    assert counts == [1, 1, 2]


# Catches averages of layers in another order than their parameters', in a pipeline that stores both by stage: those of
# an update that depends on the order, and of one that does not, which moves no rows. Five layers leave a row of zeros.
@pytest.mark.quick("5")
@pytest.mark.parametrize("layers", [4, 5])
def test_layers_in_the_order_of_stages_are_averaged_with_their_own(layers):
    sizes = {"layers_per_stage": (1, 1, 1, 2)} if layers == 5 else {}
    pipe = sk.pipeline(schedules.interleaved(2, 4, chunks=2), "stage", **sizes)
    mesh, params = mesh_of(stage=2), pipelines.make_params(layers)
    grad_fn = pipe.value_and_grad(*pipelines.PIECES)
    mix = lambda old, metrics, new: jax.tree.map(lambda old, new: old + 0.25 * new, old, new)  # noqa: E731
    rates = jnp.arange(layers, dtype=jnp.float32)[:, None]
    by_layer = lambda old, metrics, new: old | {"layers": old["layers"] | {"b": rates * new["layers"]["b"]}}  # noqa: E731
    made = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=pipe.plan, carry=mix)
    state = made.init(params, KEY, carried=jax.tree.map(lambda x: 2 * x, params))
    placement = pipe.plan.placement(state.params, mesh)

    def updated(state, carry):
        carried = Carried("step", state.carried, state.params, placement)
        return carried.update(carry, {}, state.params, state.step, Microbatches())

    both = jax.jit(lambda state: [updated(state, carry) for carry in (mix, by_layer)])
    mixed, numbered = (jax.device_get(sk.unpadded(each)) for each in both(state))
    jax.tree.map(lambda got, x: np.testing.assert_allclose(got, 2.25 * x, rtol=1e-6), mixed, params)
    np.testing.assert_allclose(numbered["layers"]["b"], rates * params["layers"]["b"], rtol=1e-6)
    if layers == 4:
        assert "gather" not in str(jax.make_jaxpr(partial(updated, carry=mix))(state))


def plain(params, batch, keys):
    return jnp.mean(batch @ params["w"])


def reading(params, batch, keys, carried):
    return jnp.mean(batch @ params["w"]) + carried["shift"]


def traced(loss_fn, carry, carried, at_init=True):
    """One step, without compiling it; the state gets `carried` from `init`, or after it."""
    options = {"mesh": sk.abstract_mesh(data=2), "plan": sk.dp("data"), "carry": carry}
    init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(0.1), **options)
    if at_init:
        state = init.abstract(W, carried=carried)
    else:
        other = {**options, "carry": lambda old, metrics, params: old}
        state = sk.make_train_step(sk.value_and_grad(plain), optax.sgd(0.1), **other).init.abstract(W, carried={"x": 1})
        state = state._replace(carried=carried)
    return jax.eval_shape(step, state, np.ones((4, 2), "f"))


SHIFT = {"shift": 0.0}
UNUSED = (
    "carried state must be read by the loss or updated by carry=; got some that nothing uses. Write "
    "loss_fn(params, batch, keys, carried), pass make_train_step(..., carry=update), or pass no carried=. The loss of "
    "a pipeline cannot read it."
)
SAME = "make_train_step: carry= must return carried state of the same tree, shapes and dtypes; "


@pytest.mark.check
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            (reading, None, None),
            "init: the loss takes carried state, and there is none. Pass init(params, key, carried=...).",
        ),
        (
            (plain, lambda old, metrics, params: old, None),
            "init: carry= updates carried state, and there is none. Pass init(params, key, carried=...).",
        ),
        ((plain, None, SHIFT), f"init: {UNUSED}"),
        (
            (reading, None, None, False),
            "step: the loss takes carried state, and there is none. Pass init(params, key, carried=...).",
        ),
        ((plain, None, jax.ShapeDtypeStruct((), np.float32), False), f"step: {UNUSED}"),
        (
            (reading, lambda old, metrics, params: 0.0, SHIFT),
            f"{SAME}got PyTreeDef(*) for PyTreeDef({{'shift': *}}). Return every leaf that it was passed.",
        ),
        (
            (reading, lambda old, metrics, params: {"shift": params["w"]}, SHIFT),
            f"{SAME}leaf shift was float32[] and is float32[2]. Return it with .astype(...) and in its shape.",
        ),
        (
            (reading, lambda old, metrics, params: {"shift": old["shift"].astype(jnp.bfloat16)}, SHIFT),
            f"{SAME}leaf shift was float32[] and is bfloat16[]. Return it with .astype(...) and in its shape.",
        ),
        (
            (reading, None, {"shift": "no"}),
            "init: every leaf of carried must be an array or a number; leaf shift is str. Let the loss and carry= "
            "close over anything else.",
        ),
    ],
)
def test_what_does_not_match_is_refused(args, message):
    assert refused(lambda: traced(*args), (ValueError, TypeError)) == message


# Catches a state that is asked for although it is given; the proof kit would have no way to a loss that reads it.
def test_a_fixed_one_is_bound_to_the_loss():
    grad_fn = sk.value_and_grad(reading)
    fixed = partial(grad_fn, carried={"shift": 2.0})
    options = {"params": W, "batches": [np.ones((4, 2), "f")], "optimizer": optax.sgd(0.1)}
    rows, first = [sk.testing.Row({"data": 2}, sk.dp("data"))], {"shift": 2.0}
    plus_one = lambda carried, metrics, params: {"shift": carried["shift"] + 1.0}  # noqa: E731
    proof = sk.testing.prove(fixed, fixed, rows=rows, laws=[sk.testing.laws.same_numbers], **options)
    assert "holds" in str(proof)
    wrong = sk.testing.one_device(grad_fn, **options, carry=lambda c, m, p: {"shift": -c["shift"]}, carried=first)
    with pytest.raises(AssertionError, match=r"carried state shift .* where it is 3 and one device's -2"):
        sk.testing.prove(grad_fn, wrong, rows=rows, carry=plus_one, carried=first, **options)
    assert "holds" in str(sk.testing.prove(grad_fn, grad_fn, rows=rows, carry=plus_one, carried=first, **options))
    with value_error(
        "one_device: the loss takes carried state, and there is none. Pass carried=, and carry= if it changes."
    ):
        sk.testing.one_device(grad_fn, optax.sgd(0.1), W, [np.ones((4, 2), "f")])


@pytest.mark.check
def test_an_evaluation_gets_what_its_loss_takes():
    evaluate = lambda loss_fn: sk.make_eval_step(  # noqa: E731
        loss_fn, mesh=sk.abstract_mesh(data=2), plan=sk.dp("data")
    )
    batch = np.ones((4, 2), "f")
    with value_error(
        "evaluate: the loss takes carried state, and there is none. Pass evaluate(params, batch, state.carried)."
    ):
        jax.eval_shape(evaluate(reading), W, batch)
    with value_error(
        "evaluate: the loss takes no carried state; got some. Write loss_fn(params, batch, keys, carried), or pass "
        "evaluate(params, batch)."
    ):
        jax.eval_shape(evaluate(plain), W, batch, SHIFT)
