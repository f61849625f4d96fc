"""Wrong arguments of the builders: a one-sentence error, before anything is traced."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk
from support.refusals import type_error, value_error

MESH, PLAN, SGD = sk.abstract_mesh(data=8), sk.dp("data"), optax.sgd(0.1)


def loss(params, batch, keys):
    return sk.Mean.of(batch @ params["w"])


def loss_of_two(params, batch):
    return jnp.mean(batch @ params["w"])


OWN = sk.value_and_grad(loss)
FUNCTION = "make_train_step: grad_fn must be a GradFn; got {}. Pass sk.value_and_grad(loss_fn)."
PLANS = "make_train_step: plan must be a Plan; got {}. Pass for example sk.dp('data'), or sk.chain(...) of several."
MESHES = "make_train_step: mesh must be a mesh; got {}. Pass for example sk.make_mesh(data=8)."
OPTIMIZER = (
    "make_train_step: optimizer must be an optax GradientTransformation; got {}. Pass for example optax.adamw(3e-4)."
)


@pytest.mark.check
@pytest.mark.parametrize(
    "change, message",
    [
        ({"grad_fn": loss}, FUNCTION.format("the function 'loss'")),
        ({"grad_fn": loss_of_two}, FUNCTION.format("the function 'loss_of_two'")),
        ({"grad_fn": None}, FUNCTION.format("None")),
        ({"grad_fn": jnp.ones(3)}, FUNCTION.format("float32[3]")),
        ({"plan": "dp"}, PLANS.format("'dp'")),
        ({"plan": sk.dp}, PLANS.format("the function 'dp'")),
        ({"plan": [PLAN]}, PLANS.format("a list")),
        ({"mesh": 8}, MESHES.format("8")),
        ({"mesh": {"data": 8}}, MESHES.format("{'data': 8}")),
        ({"optimizer": 0.1}, OPTIMIZER.format("0.1")),
        ({"optimizer": optax.sgd}, OPTIMIZER.format("the function 'sgd'")),
    ],
)
def test_a_train_step_of_something_else(change, message):
    given = {"grad_fn": OWN, "optimizer": SGD, "mesh": MESH, "plan": PLAN} | change
    with type_error(message):
        sk.make_train_step(given.pop("grad_fn"), given.pop("optimizer"), **given)


@pytest.mark.check
@pytest.mark.parametrize(
    ("returned", "told"), [(lambda loss: loss, "float32[]"), (lambda loss: sk.Mean(loss, 1), "Mean(float32[], int)")]
)
def test_a_loss_whose_signature_does_not_tell(returned, told):
    """A function of any keywords may be a GradFn: that it is a loss shows when it returns."""
    step = sk.make_train_step(lambda *given, **_: returned(jnp.sum(given[1])), SGD, mesh=MESH, plan=PLAN)
    state = step.init.abstract({"w": jax.ShapeDtypeStruct((3,), np.float32)})
    with pytest.raises(TypeError) as error:
        step.step.trace(state, jax.ShapeDtypeStruct((8, 3), np.float32))
    assert str(error.value).partition("\n-")[0] == (
        f"make_train_step: a GradFn must return (Mean, aux, gradients); got {told}. Pass sk.value_and_grad(loss_fn)."
    )


@pytest.mark.check
@pytest.mark.parametrize("plan", ["data", "dp('data')"])
def test_an_evaluation_and_a_description_of_no_plan(plan):
    of_example = "Pass for example sk.dp('data'), or sk.chain(...) of several."
    with type_error(f"make_eval_step: plan must be a Plan; got {plan!r}. {of_example}"):
        sk.make_eval_step(loss, mesh=MESH, plan=plan)
    with type_error(f"describe: plan must be a Plan; got {plan!r}. {of_example}"):
        sk.describe(plan, {"w": jnp.ones(3)}, MESH)


@pytest.mark.check
@pytest.mark.parametrize(
    "message, given",
    {
        "a plan must come with parameters; got none. Call describe(plan, params, mesh).": [PLAN],
        "params must be an array or a pytree of arrays; got 'w'. Pass arrays of jax or NumPy.": [PLAN, "w", MESH],
        "mesh must be a mesh; got 8. Pass for example sk.make_mesh(data=8).": [PLAN, np.ones(3), 8],
        "plan must be a Plan; got array([1., 1., 1.]). Pass for example sk.dp('data'), or sk.chain(...) of several.": [
            np.ones(3),
            PLAN,
            MESH,
        ],
    }.items(),
)
def test_a_description_of_something_else(given, message):
    with type_error(f"describe: {message}"):
        sk.describe(*given)


@pytest.mark.check
def test_a_triage_of_a_loss_and_an_evaluation_of_a_gradfn():
    with type_error(FUNCTION.format("the function 'loss'").replace("make_train_step", "triage")):
        sk.runtime.triage(loss, mesh=MESH, plan=PLAN)
    with type_error(
        "make_eval_step: loss_fn must be a loss function; got the function 'grad_fn'. Pass loss_fn itself, without "
        "value_and_grad."
    ):
        sk.make_eval_step(OWN, mesh=MESH, plan=PLAN)


@pytest.mark.check
def test_what_an_evaluation_and_a_first_state_are_made_of():
    evaluate = sk.make_eval_step(loss, mesh=MESH, plan=PLAN)
    init, _ = sk.make_train_step(OWN, SGD, mesh=MESH, plan=PLAN)
    params, mixed = {"w": np.ones(3)}, {"layer": {"w": np.ones(3), 1: np.ones(3)}}
    with type_error("evaluate: params must be the parameters; got a TrainState. Pass state.params."):
        evaluate(init.abstract(params), np.ones((8, 3)))
    with pytest.raises(ValueError, match=r"^evaluate: every array of the batch must .*; got no array\. Pass arrays "):
        evaluate.trace(params, {})
    keys = "must be of one type, because jax sorts the leaves by them; got 'w', 1. Make all of them strings."
    with type_error(f"init: the keys of each dict in params {keys}"):
        init.abstract(mixed)
    with type_error(f"evaluate: the keys of each dict in batch {keys}"):
        evaluate(params, mixed)
    with type_error(f"layouts: the keys of each dict in params {keys}"):
        PLAN.layouts(mixed, MESH)


@pytest.mark.check
@pytest.mark.parametrize(
    "key, told", [(0, "int 0"), (None, "NoneType None"), (np.int32(3), "int32[]"), (jnp.zeros(2), "float32[2]")]
)
def test_a_run_without_a_key(key, told):
    init, _ = sk.make_train_step(OWN, SGD, mesh=MESH, plan=PLAN)
    with type_error(f"init: key must be one jax key; got {told}. Pass for example jax.random.key(0)."):
        init({"w": np.ones(3, "f")}, key)


# Their draws under vmap are those of the whole batch: dropout would depend on mesh and accumulation.
@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_whose_draws_go_by_the_batch(impl):
    key = jax.random.key(0, impl=impl)
    keys = jax.random.split(key, 4)
    init, _ = sk.make_train_step(OWN, SGD, mesh=MESH, plan=PLAN)
    for where, use in {
        "init": lambda: init({"w": jnp.ones(3)}, key),
        "example_keys": lambda: sk.example_keys(key, 4),
        "dropout": lambda: sk.dropout(jnp.ones((4, 2)), keys, 0.5),
    }.items():
        with value_error(
            f"{where}: keys must draw the same numbers in every batch; got {impl!r}. Pass jax.random.key(seed, "
            "impl='threefry2x32')."
        ):
            use()


# Alone in finding: jit moves the leaves of another layout by collectives that no census counts.
# proves N52
@pytest.mark.check
@pytest.mark.parametrize("axis_type", [None, jax.sharding.AxisType.Explicit])
def test_a_state_of_another_plan_or_mesh_and_what_is_no_state(axis_type):
    kinds = {} if axis_type is None else {"axis_types": axis_type}
    mesh = sk.make_mesh(data=8, **kinds)
    params, batch = {"w": np.ones((16, 8), np.float32)}, np.ones((8, 16), np.float32)
    plans = {"dp": sk.dp("data"), "fsdp": sk.fsdp("data", min_size=1), "zero1": sk.zero1("data", min_size=1)}
    made = {
        name: sk.make_train_step(OWN, optax.sgd(0.1, momentum=0.9), mesh=mesh, plan=plan)
        for name, plan in plans.items()
    }
    states = {name: init.abstract(params) for name, (init, _) in made.items()}

    def refused(name, state):
        with pytest.raises((ValueError, TypeError)) as error:
            made[name][1].trace(state, batch)
        return str(error.value)

    for name, state in states.items():
        made[name][1].trace(state, batch)
    wrong = "step: the state must be laid out as the plan of the step says; leaf {} is {} and must be {}. Pass "
    wrong += "sk.reshard(state, its plan, the plan of the step, mesh=mesh)."
    assert refused("dp", states["fsdp"]) == wrong.format("params.w", "P('data',)", "P()")
    assert refused("fsdp", states["dp"]) == wrong.format("params.w", "P()", "P('data',)")
    assert refused("dp", states["zero1"]) == wrong.format("opt_state.0.trace.w", "P('data',)", "P()")
    init, _ = sk.make_train_step(OWN, optax.sgd(0.1, momentum=0.9), mesh=sk.abstract_mesh(data=4), plan=PLAN)
    assert refused("dp", init.abstract(params)) == (
        "step: the state must be on the mesh of the step, data=8; leaf step is on data=4. Save and restore it as a "
        "checkpoint, or pass jax.device_put(state, layouts of init.abstract(params))."
    )
    assert refused("dp", params) == (
        "step: the first argument must be the TrainState that init or the last step returned; got dict. Call "
        "step(state, batch), with state = init(params, key)."
    )


@pytest.mark.check
def test_a_state_of_another_optimizer():
    """sgd took the state of adam, and returned it unused; adam failed at sgd's, and was said to need more arguments."""
    optimizers = {"sgd": SGD, "adam": optax.adam(0.1)}
    made = {name: sk.make_train_step(OWN, optimizer, mesh=MESH, plan=PLAN) for name, optimizer in optimizers.items()}
    params, batch = {"w": jax.ShapeDtypeStruct((8,), jnp.float32)}, jax.ShapeDtypeStruct((8, 8), jnp.float32)
    states = {name: init.abstract(params) for name, (init, _) in made.items()}
    lowered = sk.make_train_step(
        OWN, SGD, mesh=MESH, plan=PLAN, precision=sk.Precision(param=jnp.bfloat16, master=jnp.float32)
    )
    wrong = "step: the state must be of the optimizer and the precision of the step; it {}. Build the step with those "
    wrong += "of the state, or begin anew with init(state.params, state.key)."
    extra = wrong.format("has leaf opt_state.0.count, which this optimizer does not make")
    for step, state, message in [
        (made["sgd"].step, states["adam"], extra),
        (made["adam"].step, states["sgd"], wrong.format("lacks leaf opt_state.0.count")),
        (lowered.step, states["sgd"], wrong.format("lacks leaf opt_state.copy.w")),
    ]:
        with value_error(message):
            step.trace(state, batch)


@pytest.mark.check
def test_a_batch_on_other_devices():
    mesh = sk.make_mesh(jax.devices()[:2], data=2)
    init, step = sk.make_train_step(OWN, SGD, mesh=mesh, plan=PLAN)
    state = init.abstract({"w": jax.ShapeDtypeStruct((8,), jnp.float32)})
    elsewhere = jax.device_put(np.ones((4, 8), np.float32), jax.devices()[5])
    with value_error(
        "step: the batch must be on the devices of the mesh, data=2; leaf x is on devices [5]. Pass arrays of the "
        "host, or sk.shard(batch, mesh, plan.batch_spec(mesh))."
    ):
        step.lower(state, {"x": elsewhere})


def masked_mean(params, batch, keys):
    error = (batch["x"] @ params["w"]) ** 2
    return jnp.sum(error * batch["mask"]) / jnp.maximum(jnp.sum(batch["mask"]), 1)


@pytest.mark.parametrize(
    ("sizes", "loss", "examples", "message"),
    [
        (
            {"data": 2},
            masked_mean,
            "mixed",
            "each device divides by a sum over its examples, and the quotients are summed over 'data'",
        ),
        (
            {"data": 2, "model": 2},
            lambda params, batch, keys: jnp.mean((batch["x"] @ params["w"]) ** 2),
            "apart",
            "the 2 devices along axis 'model' all do the same work",
        ),
    ],
)
def test_the_first_step_warns_once_of_what_is_unintended(sizes, loss, examples, message):
    mesh = sk.make_mesh(jax.devices()[: 2 * len(sizes)], **sizes)
    job = {"mesh": mesh, "plan": sk.dp("data"), "examples": examples}
    init, step = sk.make_train_step(sk.value_and_grad(loss), optax.sgd(0.1), **job)
    state = init({"w": np.ones(4, np.float32)}, jax.random.key(0))
    batch = {"x": np.ones((4, 4), np.float32), "mask": np.float32([1, 0, 1, 0])}
    with pytest.warns(UserWarning, match=message) as told:
        state, _ = step(state, batch)
    assert len(told) == 1 and told[0].filename == __file__
    step(state, batch)


# Each of these ended in an error of Python or jax that names nothing of the caller's.
@pytest.mark.check
def test_arguments_that_are_left_out():
    with type_error(
        "value_and_grad: loss_fn must take (params, batch, keys), or (params, batch, keys, carried); got (params, "
        "batch). Add the arguments that are missing: keys has one key per example, and may go unused."
    ):
        sk.value_and_grad(loss_of_two)
    init, step = sk.make_train_step(OWN, SGD, mesh=MESH, plan=PLAN)
    params = {"w": np.ones(4, np.float32)}
    with type_error("step: the batch must follow the state; got none. Pass for example sk.census(step, state, batch)."):
        sk.census(step, init.abstract(params))
