"""Every public transformation of the installed optax: the parameters of optax alone, or refused by name."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk
from shardkit.steps.optimizer import wrap_optimizer
from support.refusals import raises

SGD = optax.sgd(1e-2)


def norm(updates, *_, **__):
    return optax.tree.norm(updates)


# What the others take beside a learning rate.
ARGUMENTS = {
    "adaptive_grad_clip": (0.1,),
    "add_noise": (0.1, 0.5),
    "apply_if_finite": (SGD, 2),
    "chain": (SGD, optax.clip(0.1)),
    "clip": (0.1,),
    "clip_by_block_rms": (0.1,),
    "clip_by_global_norm": (0.1,),
    "conditionally_mask": (SGD, lambda step: step > 0),
    "conditionally_transform": (SGD, lambda step: step > 0),
    "differentially_private_aggregate": (1.0, 0.1, 3),
    "dpsgd": (1e-2, 1.0, 0.1, 3),
    "ema": (0.9,),
    "flatten": (SGD,),
    "freeze": ({"w": True, "b": False},),
    "masked": (SGD, {"w": True, "b": False}),
    "measure_with_ema": (norm, 0.9),
    "mechanize": (SGD,),
    "monitor": ({"norm": norm},),
    "multi_transform": ({"a": SGD, "b": optax.adam(1e-2)}, {"w": "a", "b": "b"}),
    "named_chain": (("first", SGD), ("then", optax.clip(0.1))),
    "partition": ({"a": SGD, "b": optax.adam(1e-2)}, {"w": "a", "b": "b"}),
    "lookahead": (SGD, 2, 0.5),
    "sam": (SGD, SGD),
    "scale": (0.1,),
    "scale_by_backtracking_linesearch": (4,),
    "scale_by_schedule": (lambda step: 0.1,),
    "scale_by_zoom_linesearch": (4,),
    "schedule_free": (SGD, 1e-2),
    "selective_transform": (SGD,),
    "snapshot": ("norm", norm),
    "split_real_and_imaginary": (SGD,),
    "stateless": (lambda updates, params: updates,),
    "stateless_with_tree_map": (lambda update, param: update,),
    "trace": (0.9,),
    "with_extra_args_support": (SGD,),
}
OPTIONS = {
    "add_noise": {"key": 3},
    "noisy_sgd": {"key": 3},
    "selective_transform": {"freeze_mask": {"w": True, "b": False}},
}
UNTYPED = ("MultiSteps", "dog", "dowg", "hutchinson_estimator_diag_hessian", "monitor", "scale_by_factored_rms")
ARGUMENTS["MultiSteps"] = (SGD, 2)
# What needs more than gradients, state, parameters and loss; measures, which are no updates; one for matrices alone.
REFUSED = {
    *("measure_with_ema", "monitor", "scale_by_muon"),
    *("differentially_private_aggregate", "dpsgd", "hutchinson_estimator_diag_hessian", "lbfgs", "lookahead"),
    *("scale_by_backtracking_linesearch", "scale_by_zoom_linesearch", "sophia"),
}
GIVEN = {"polyak_sgd", "scale_by_polyak", "momo", "momo_adam", "reduce_on_plateau"}  # the loss
PARAMS = {"w": np.linspace(-1, 1, 8, dtype="f").reshape(4, 2), "b": np.ones(4, "f")}


def every():
    found = {}
    for module in (optax, optax.contrib):
        for name in dir(module):
            make = getattr(module, name)
            if name in UNTYPED or (
                inspect.isfunction(make) and "GradientTransformation" in str(inspect.signature(make).return_annotation)
            ):
                found[name] = make
    return {name: make for name, make in found.items() if not name.startswith(("_", "inject_"))}


def made(name, make):
    needed = [p.name for p in inspect.signature(make).parameters.values() if p.default is p.empty]
    return make(*ARGUMENTS.get(name, (1e-2,) * (needed == ["learning_rate"])), **OPTIONS.get(name, {}))


def loss_fn(params, batch, keys):
    of_each = [jnp.sum((batch @ each["w"]) ** 2, axis=1) + jnp.sum(each["b"] ** 3) for each in params.values()]
    return sk.Mean.of(sum(of_each))


def batch(step):
    return np.random.default_rng(step).normal(size=(4, 4)).astype("f")


def together(optimizers, given):
    """All optimizers as one, each with parameters of its own; `given` says whether one is given the loss."""

    def init(params):
        return {name: each.init(params[name]) for name, each in optimizers.items()}

    def update(grads, state, params, *, value):
        found = {
            name: each.update(grads[name], state[name], params[name], **({"value": value} if name in given else {}))
            for name, each in optimizers.items()
        }
        return tuple({name: pair[i] for name, pair in found.items()} for i in (0, 1))

    return optax.GradientTransformationExtraArgs(init, update)


def chosen(names):
    return {name: made(name, make) for name, make in every().items() if name in names}


# Catches an argument that one of them does not take, and an error of jax or optax in place of a sentence.
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@jax.numpy_rank_promotion("allow")
@jax.numpy_dtype_promotion("standard")
def test_each_is_taken_or_refused_by_name():
    grad_fn = sk.value_and_grad(lambda params, batch, keys: loss_fn({"": params}, batch, keys))
    refused = {}
    for name, optimizer in chosen(every()).items():
        init, step = sk.make_train_step(grad_fn, optimizer, mesh=sk.abstract_mesh(data=2), plan=sk.dp("data"))
        try:
            step.trace(init.abstract(PARAMS), jax.ShapeDtypeStruct((4, 4), jnp.float32))
        except (TypeError, ValueError) as error:
            refused[name] = str(error)
    assert refused.keys() == REFUSED & every().keys()
    unnamed = {name for name, text in refused.items() if not text.startswith("make_train_step: the optimizer ")}
    assert unnamed == set()  # lbfgs and sophia were refused in the words of jax and optax, with a note
    begins = "make_train_step: the optimizer {} gets gradients, its state, the parameters and value=loss{}. If it "
    ends = "needs more, pass another one, or wrap it in a GradientTransformation that passes the missing arguments."
    assert refused["lookahead"].startswith(
        begins.format("lookahead", ", and fails: AttributeError: 'dict' object has no attribute 'fast'") + ends
    )
    missing = (
        "scale_by_zoom_linesearch.<locals>.update_fn() missing 2 required keyword-only arguments: 'grad' and 'value_fn'"
    )
    assert refused["lbfgs"] == begins.format("chain", f", and fails: TypeError: {missing}") + ends
    own = begins.format("scale_by_zoom_linesearch", f", and fails: TypeError: {missing}")
    assert refused["scale_by_zoom_linesearch"] == own + ends
    shapes = ", and must return updates of the gradients' shapes; it returns others"
    assert refused["dpsgd"].startswith(begins.format("chain", shapes) + ends)
    tree = ", and must return a state of the same tree; it returns another"
    assert refused["monitor"].startswith(begins.format("monitor", tree) + ends)


@pytest.mark.parametrize("kind", [TypeError, ValueError, RuntimeError])
def test_what_an_optimizer_raises_is_its_own(kind):
    """Only who wrote it knows why: that it asks for more, which was said of every error, may not be the reason."""

    def fails(*_):
        raise kind("my own reason")

    for optimizer in (SGD._replace(init=fails), SGD._replace(update=fails)):
        init, step = sk.make_train_step(
            sk.value_and_grad(loss_fn), optimizer, mesh=sk.abstract_mesh(data=2), plan=sk.dp("data")
        )
        with raises(kind, "my own reason"):
            step.trace(init.abstract({"": PARAMS}), jax.ShapeDtypeStruct((4, 4), jnp.float32))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@jax.numpy_rank_promotion("allow")
@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["sam", "polyak_sgd", "reduce_on_plateau", "MultiSteps", "clip_by_global_norm"], id="calls"),
        pytest.param(None, id="all", marks=pytest.mark.deep),
    ],
)
def test_the_same_parameters_as_optax_alone(names):
    """In one program, which compiles once; those that are called in other ways, and in the deep tier all."""
    optimizers = chosen(names or every().keys() - REFUSED)
    params = dict.fromkeys(optimizers, PARAMS)
    alone = together(optimizers, GIVEN)

    @jax.jit
    def update(params, state, batch):
        mean = lambda params: jnp.divide(*loss_fn(params, batch, None))  # noqa: E731
        loss, grads = jax.value_and_grad(mean)(params)
        updates, state = alone.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    ours = together({name: wrap_optimizer(each) for name, each in optimizers.items()}, optimizers)
    mesh, plan = sk.make_mesh(jax.devices()[:2], data=2), sk.fsdp("data", min_size=1)
    init, step = sk.make_train_step(sk.value_and_grad(loss_fn), ours, mesh=mesh, plan=plan)
    state, (wanted, alone_state) = init(params, jax.random.key(0)), (params, alone.init(params))
    for index in range(3):
        state, _ = step(state, batch(index))
        wanted, alone_state = update(wanted, alone_state, batch(index))
    far = []
    for name, each in wanted.items():
        for leaf, value in each.items():
            gap, largest = np.max(np.abs(state.params[name][leaf] - value)), np.max(np.abs(value))
            if not gap <= 1e-5 * largest:
                far.append((name, leaf, float(gap), float(largest)))
    assert far == []
