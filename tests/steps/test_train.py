"""The builder: state and its layout, one compile, one reduction, donation, non-finite steps, bad batches."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.analysis import census
from shardkit.models import transformer
from shardkit.steps.step import NonFiniteError
from support.counting import Compiles
from support.refusals import type_error, value_error

KEY = jax.random.key(3)
UNTRAINED = [(np.array([3, 7, -2]), "int64"), (np.ones(2, bool), "bool"), (np.ones(2, np.complex64), "complex64")]
UNTRAINED += [(jax.random.key(0), "key<fry>"), ("relu", "str"), (len, "builtin_function_or_method")]


def loss_fn(params, batch, keys):
    h = sk.dropout(jnp.tanh(batch["x"] @ params["weight"]), keys, 0.1)
    return sk.Mean.of(jnp.sum((h - batch["y"]) ** 2, -1), batch["weight"]), {"size": sk.Mean.of(jnp.abs(h))}


def make_params():
    return {"weight": jax.random.normal(jax.random.key(0), (16, 8))}


def make_batch(seed=0, size=32):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(size, 16)), rng.normal(size=(size, 8))
    return {"x": x.astype(np.float32), "y": y.astype(np.float32), "weight": rng.integers(1, 5, size).astype(np.float32)}


def make(mesh, plan=None, optimizer=None, **options):
    plan = plan or sk.dp("data")
    return sk.make_train_step(sk.value_and_grad(loss_fn), optimizer or optax.sgd(0.1), mesh=mesh, plan=plan, **options)


# proves S94
@pytest.mark.quick("raw-fsdp", "typed-zero")
@pytest.mark.parametrize("plan", ["dp", "fsdp", "zero"])
@pytest.mark.parametrize("key", [KEY, jax.random.PRNGKey(3)], ids=["typed", "raw"])
def test_nothing_is_compiled_after_the_first_step(plan, key, data8):
    plans = {"dp": sk.dp("data"), "fsdp": sk.fsdp("data", min_size=1), "zero": sk.zero1("data", min_size=1)}
    with jax.numpy_dtype_promotion("standard"):
        init, step = make(data8, plans[plan], optax.adamw(1e-3))
        # weakly typed and numpy leaves must not make a second program either
        state = init(make_params() | {"unused": 0.5, "table": np.zeros(8, np.float32)}, key)
        before = [(x.sharding, x.dtype) for x in jax.tree.leaves(state)]
        with Compiles() as first:
            state, _ = step(state, make_batch())
        batches = [make_batch(seed) for seed in range(1, 4)]
        with Compiles() as later:
            for batch in batches:
                state, _ = step(state, batch)
        assert (first.count, later.count) == (1, 0)
        assert [(x.sharding, x.dtype) for x in jax.tree.leaves(state)] == before


def count_python_calls(function, *args):
    names = []
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return len(names)


def test_a_call_runs_as_few_functions_of_python_for_a_hundred_leaves_as_for_one(data8):
    """Each was asked for its layout, layouts were compared by value, and jax made that of the key anew at each call."""
    counts = {}
    for leaves in (1, 100):
        grad_fn = sk.value_and_grad(lambda p, b, k: sk.Mean.of(b * sum(jnp.sum(w) for w in p.values())))
        init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=data8, plan=sk.dp("data"), check=False)
        state = init({f"w{number}": jnp.ones(2) for number in range(leaves)}, jax.random.key(0))
        batch = sk.shard(np.ones(8, np.float32), data8, P("data"))
        for _ in range(3):
            state, _ = step(state, batch)
        counts[leaves] = count_python_calls(step, state, batch)
    assert counts[1] == counts[100] <= 20


def test_a_donated_leaf_is_found_beside_one_of_the_host(data8):
    """jax's own `is_deleted` asked of an array of numpy is a TypeError."""
    grad_fn = sk.value_and_grad(lambda p, b, k: sk.Mean.of(b * (p["v"][0] + p["w"][0])))
    init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=data8, plan=sk.dp("data"))
    state = init({"v": np.ones(2, np.float32), "w": np.ones(2, np.float32)}, jax.random.key(0))
    newest, _ = step(state, np.ones(8, np.float32))
    mixed = {"v": np.ones(2, np.float32), "w": state.params["w"]}
    with pytest.raises(ValueError, match=r"passed its leaf params\.w and donated the buffer"):
        step(newest._replace(params=mixed), np.ones(8, np.float32))
    mixed = {"v": np.ones(2, np.float32), "w": newest.params["w"]}
    assert int(step(newest._replace(params=mixed), np.ones(8, np.float32))[0].step) == 2


def test_the_step_donates_its_state_and_leaves_the_callers_arrays_alone(data8):
    init, step = make(data8)
    params, key = sk.shard(make_params(), data8, P()), jax.device_put(KEY, jax.NamedSharding(data8, P()))
    state = init(params, key)
    new, _ = step(state, make_batch())
    assert state.params["weight"].is_deleted()
    assert not params["weight"].is_deleted() and not key.is_deleted()
    assert int(new.step) == 1


# proves S27, F44: no device ever holds the whole, and the values are those of one device
def test_parameters_are_made_in_their_final_layout(data8):
    config = transformer.Config(vocabulary=64, layers=8, dim=32, heads=4)

    def make_transformer(key):
        return transformer.init(key, config)

    init, _ = make(data8, sk.fsdp("data", min_size=1))
    state = init(make_transformer, KEY)
    whole = jax.eval_shape(make_transformer, KEY)
    for leaf, shape in zip(jax.tree.leaves(state.params), jax.tree.leaves(whole), strict=True):
        assert leaf.shape == shape.shape
        assert {s.data.size * 8 for s in leaf.addressable_shards} == {leaf.size}
    specs = jax.tree.map(lambda x: x.sharding, state.params)
    compiled = jax.jit(make_transformer, out_shardings=specs).lower(KEY).compile().memory_analysis()
    total = sum(x.size * 4 for x in jax.tree.leaves(whole))
    assert total // 8 <= compiled.output_size_in_bytes < total // 8 + 1024  # and a pointer for each leaf
    assert compiled.temp_size_in_bytes < total // 4
    one = transformer.init(KEY, config)
    for leaf, expected in zip(jax.tree.leaves(state.params), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(leaf, expected, rtol=1e-6)


def test_init_of_a_function_equals_init_of_its_result(data8):
    init, _ = make(data8)
    made = init(lambda key: {"weight": jax.random.normal(key, (16, 8))}, KEY)
    given = init({"weight": jax.random.normal(KEY, (16, 8))}, KEY)
    np.testing.assert_array_equal(made.params["weight"], given.params["weight"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Linear:
    """A callable pytree, such as an equinox module."""

    weight: jax.Array

    def __call__(self, x):
        return x @ self.weight


class Unregistered(Linear):
    """The same, but not a pytree."""


# It was called with the key, as the function that makes the parameters.
@pytest.mark.quick("fsdp('data')")
@pytest.mark.parametrize("plan", [sk.dp("data"), sk.fsdp("data", min_size=1)], ids=str)
def test_a_module_that_can_be_called_is_the_parameters(plan, data8):
    grad_fn = sk.value_and_grad(lambda model, batch, keys: sk.Mean.of(model(batch["x"])))
    init, step = sk.make_train_step(grad_fn, optax.sgd(1.0), mesh=data8, plan=plan, accumulate=2)
    model, batch = Linear(jax.random.normal(KEY, (8,))), {"x": np.ones((16, 8), np.float32)}
    assert init.abstract(model).params.weight.shape == (8,)
    state, metrics = step(init(model, KEY), batch)
    assert isinstance(state.params, Linear)
    np.testing.assert_allclose(metrics["loss"], jnp.sum(model.weight), rtol=1e-6)
    np.testing.assert_allclose(state.params.weight, model.weight - 1, rtol=1e-6)
    made = init.abstract(jax.tree_util.Partial(lambda key: Linear(jax.random.normal(key, (8,)))))  # without a leaf
    assert made.params.weight.shape == (8,)


@pytest.mark.check
def test_an_object_that_is_no_pytree_and_no_function_of_a_key_is_told(data8):
    init, _ = make(data8)
    for make_ in (init, lambda params, key: init.abstract(params)):
        with pytest.raises(TypeError) as error:
            make_(Unregistered(np.ones((3, 2), np.float32)), KEY)
        text, end = str(error.value).split(" failed when ")[0], str(error.value).split(". Register ")[1]
        assert text == (
            "init: params must be a pytree of arrays, or a function of the key that makes one; got an object of type "
            "Unregistered, which is not a pytree and"
        )
        assert end == "the type with jax.tree_util.register_dataclass, or pass its arrays."


def test_init_compiles_one_program_and_leaves_the_hosts_arrays_to_the_layout(data8, monkeypatch):
    """Each program costs seconds where a model is large; a whole array on one device may be more than it holds."""
    params, placed, put = jax.tree.map(np.asarray, make_params()), [], jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, *where: (placed.extend(jax.tree.leaves(x)), put(x, *where))[1])
    init, _ = make(data8, sk.fsdp("data", min_size=1), optax.sgd(0.1, momentum=0.9))
    with Compiles() as counted:
        init(params, KEY)
    assert counted.count == 1
    assert placed and all(isinstance(x, np.ndarray) for x in placed)


# proves T2: microbatches are parts of the batch; each of them the whole batch gives the same mean, and counts it again
@pytest.mark.parametrize("accumulate", [1, 4])
def test_accumulation_leaves_the_effective_batch_as_it_is(accumulate):
    grad_fn = sk.value_and_grad(lambda params, x, keys: sk.Mean.of(x * params))
    mesh = sk.make_mesh(jax.devices()[:2], data=2)
    init, step = sk.make_train_step(grad_fn, optax.sgd(1.0), mesh=mesh, plan=sk.dp("data"), accumulate=accumulate)
    state, metrics = step(init(jnp.float32(2), KEY), np.arange(32, dtype=np.float32))
    assert (float(metrics["weight"]), float(metrics["loss"])) == (32, 31)
    assert float(state.params) == 2 - 15.5


def gathering(params, batch, keys):
    h = sk.gathered(lambda w, x: x @ w)(params["weight"], batch["x"])
    return sk.Mean.of(h @ sk.all_gather(h, "data").T)


def alone(params, batch, keys):
    return sk.Mean.of(sk.gathered(lambda w, x: x @ w)(params["weight"], batch["x"]))


@pytest.mark.parametrize("plan", ["dp", "fsdp", "zero2"])
@pytest.mark.check
def test_a_loss_that_mixes_the_examples_of_devices_is_told_of_accumulation(plan):
    """Fewer negatives in each microbatch are another loss; what a plan sends for its weights is no part of it."""
    lazy = {"layerwise": ("weight",), "min_size": 1}
    plans = {"dp": sk.dp("data"), "fsdp": sk.fsdp("data", **lazy), "zero2": sk.zero2("data", **lazy)}

    def traced(loss, accumulate):
        options = {"mesh": sk.abstract_mesh(data=2), "plan": plans[plan], "accumulate": accumulate}
        init, step = sk.make_train_step(sk.value_and_grad(loss), optax.sgd(0.1), **options)
        jax.eval_shape(step, init.abstract(jax.eval_shape(make_params)), make_batch())

    traced(alone, 2)
    traced(gathering, 1)
    with pytest.warns(UserWarning) as caught:
        traced(gathering, 2)
    at = gathering.__code__.co_firstlineno + 2
    assert [str(each.message) for each in caught] == [
        "make_train_step: with accumulate=2 the loss gets one microbatch at a time, so a collective over an axis of "
        f"the batch mixes the examples of one microbatch; it calls all_gather over 'data' at test_train.py:{at} "
        "(gathering). Leave accumulate at 1, and save memory with scan_layers(..., microbatches=) or remat=, if all "
        "examples count together."
    ]


# proves S58, S64, S65, S69: what each device holds
def test_optimizer_state_is_laid_out_as_the_update(data8):
    params = make_params()
    for plan, params_share, moments_share in [
        (sk.dp("data"), 1, 1),
        (sk.zero1("data", min_size=1), 1, 8),
        (sk.fsdp("data", min_size=1), 8, 8),
    ]:
        state = make(data8, plan, optax.adam(1e-3))[0](params, KEY)
        assert sk.bytes_per_device(state.params) == 16 * 8 * 4 // params_share
        moments = (state.opt_state[0].mu, state.opt_state[0].nu)
        assert sk.bytes_per_device(moments) == 2 * 16 * 8 * 4 // moments_share


# proves F58: one reduction a step, whatever the accumulation, and none inside the loop
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_the_collectives_of_a_data_parallel_step(accumulate, data8):
    init, step = make(data8, accumulate=accumulate)
    rows = census(step, init(make_params(), KEY), make_batch()).rows
    assert sorted((row.kind, row.axes, row.bytes_in, row.count) for row in rows) == [
        ("all_reduce", ("data",), 4 * 4, 1),  # totals and weights of the loss and one metric, together
        ("all_reduce", ("data",), 16 * 8 * 4, 1),  # the gradient
    ]


def test_the_collectives_of_zero1_and_fsdp(data8):
    shard, whole = 2 * 8 * 4, 16 * 8 * 4
    for plan in (sk.zero1("data", min_size=1), sk.fsdp("data", min_size=1)):
        init, step = make(data8, plan)
        rows = census(step, init(make_params(), KEY), make_batch()).rows
        assert sorted((row.kind, row.bytes_in, row.count) for row in rows) == [
            ("all_gather", shard, 1),
            ("all_reduce", 4 * 4, 1),
            ("reduce_scatter", whole, 1),
        ]


# proves F56, S123: all devices decide together
@pytest.mark.quick("fsdp")
@pytest.mark.parametrize("plan", ["dp", "fsdp"])
def test_a_nonfinite_gradient_on_one_device_skips_the_step_on_all(plan, data8):
    plan = {"dp": sk.dp("data"), "fsdp": sk.fsdp("data", min_size=1)}[plan]
    init, step = make(data8, plan, optax.sgd(0.1, momentum=0.9), nonfinite="skip")
    state, metrics = step(init(make_params(), KEY), make_batch())
    assert bool(metrics["finite"])
    before = jax.device_get((state.params, state.opt_state))
    bad = make_batch(1)
    bad["x"][31, 0] = np.nan  # the last example: device 7 alone sees it
    state, metrics = step(state, bad)
    assert not bool(metrics["finite"]) and np.isnan(metrics["loss"])
    assert int(state.step) == 2
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((state.params, state.opt_state)), before)
    state, metrics = step(state, make_batch(2))
    assert bool(metrics["finite"]) and np.isfinite(metrics["loss"])


def test_a_nonfinite_step_can_stop_the_run(data8):
    init, step = make(data8, nonfinite="stop")
    state, _ = step(init(make_params(), KEY), make_batch())
    before = jax.device_get(state.params)
    bad = make_batch(1)
    bad["y"][0, 0] = np.inf
    with pytest.raises(NonFiniteError) as error:
        step(state, bad)
    assert str(error.value) == (
        "step 2: the loss (inf) or a gradient is not finite. The parameters are as before the step; lower the "
        "learning rate, or pass nonfinite='skip'."
    )
    np.testing.assert_array_equal(error.value.state.params["weight"], before["weight"])
    assert np.isinf(error.value.metrics["loss"])


def test_by_default_a_nonfinite_step_is_taken(data8):
    init, step = make(data8)
    bad = make_batch()
    bad["x"][0, 0] = np.nan
    state, metrics = step(init(make_params(), KEY), bad)
    assert np.isnan(state.params["weight"]).any() and "finite" not in metrics


# proves F60, S60
def test_evaluation_is_the_loss_without_dropout(data8):
    evaluate = sk.make_eval_step(loss_fn, mesh=data8, plan=sk.dp("data"))
    params, batch = make_params(), make_batch()
    loss, aux = loss_fn(params, batch, None)
    metrics = evaluate(params, batch)
    np.testing.assert_allclose(metrics["loss"], loss.total / loss.weight, rtol=1e-6)
    np.testing.assert_allclose(metrics["size"], aux["size"].total / aux["size"].weight, rtol=1e-6)
    assert float(metrics["weight"]) == batch["weight"].sum()


def test_scalars_in_the_batch_reach_every_device_and_the_value_the_optimizer(data8):
    grad_fn = sk.value_and_grad(lambda p, batch, keys: jnp.mean(batch["x"] * batch["scale"]) * p)
    init, step = sk.make_train_step(grad_fn, optax.sgd(1.0), mesh=data8, plan=sk.dp("data"), accumulate=2)
    state, _ = step(init(np.float32(0), KEY), {"x": np.ones(16, np.float32), "scale": np.float32(3)})
    assert float(state.params) == -3.0
    seen = optax.GradientTransformationExtraArgs(lambda p: jnp.float32(0), lambda g, s, p=None, *, value: (g, value))
    init, step = make(data8, optimizer=seen)
    state, metrics = step(init(make_params(), KEY), make_batch())
    assert float(state.opt_state) == float(metrics["loss"]) != 0


@pytest.mark.parametrize(
    "message, refusal",
    {
        "make_train_step: batch dim 0 must be divisible by axis 'data'; leaf weight has size 30 over 8 devices. "
        "Choose another size, or pad with examples of weight 0.": (make_batch(size=30), {}),
        "make_train_step: batch dim 0 must be divisible by axis 'data' times accumulate; leaf weight has size 40 "
        "over 8 devices x 2 microbatches. Choose another size, or pad with examples of weight 0.": (
            make_batch(size=40),
            {"accumulate": 2},
        ),
        "make_train_step: every array of the batch must have the same number of examples along dim 0; got weight: "
        "32, x: 32, y: 16. Pass arrays that share dim 0, and put values for all examples into carried "
        "state, or into the loss.": (make_batch() | {"y": np.zeros((16, 8), np.float32)}, {}),
        "make_train_step: every array of the batch must have the same number of examples along dim 0; got no array. "
        "Pass arrays that share dim 0, and put values for all examples into carried "
        "state, or into the loss.": ({"scale": np.float32(1)}, {}),
    }.items(),
)
def test_bad_batches_are_refused(refusal, message, data8):
    batch, options = refusal
    init, step = make(data8, **options)
    with value_error(message):
        step(init(make_params(), KEY), batch)


def test_microbatches_divide_the_batch_of_one_device_too():
    init, step = make(sk.make_mesh(jax.devices()[:1], data=1), accumulate=3)
    with value_error(
        "make_train_step: batch dim 0 must be divisible by accumulate; leaf weight has size 32 over 1 device x 3 "
        "microbatches. Choose another size, or pad with examples of weight 0."
    ):
        step(init(make_params(), KEY), make_batch())


@pytest.mark.parametrize(
    "message, options",
    {
        "make_train_step: accumulate must be at least 1; got 0. Pass accumulate=1 or more.": {"accumulate": 0},
        "make_train_step: nonfinite must be 'keep', 'skip' or 'stop'; got 'raise'. "
        "Pass for example nonfinite='keep'.": {"nonfinite": "raise"},
        "precision: the name must be one of 'no', 'bf16', 'fp16'; got 'fp8'. Pass one of them or a Precision.": {
            "precision": "fp8"
        },
    }.items(),
)
def test_bad_options_are_refused(options, message, data8):
    with value_error(message):
        make(data8, **options)


def test_profiles_name_the_program_and_aux_takes_no_name_of_the_builders(data8):
    init, step = make(data8)
    assert step.lower(init(make_params(), KEY), make_batch()).as_text().startswith("module @jit_step ")
    grad_fn = sk.value_and_grad(lambda p, batch, keys: (p * jnp.mean(batch), {"loss": jnp.float32(1)}))
    init, step = sk.make_train_step(grad_fn, optax.sgd(1.0), mesh=data8, plan=sk.dp("data"))
    with value_error("make_train_step: aux must not use the names 'loss'. Rename them."):
        step(init(np.float32(0), KEY), np.ones(8, np.float32))


@pytest.mark.parametrize("leaf, name", UNTRAINED)
def test_leaves_that_cannot_be_trained_are_refused(leaf, name, data8):
    init, _ = sk.make_train_step(sk.value_and_grad(loss_fn), optax.adamw(1e-3), mesh=data8, plan=sk.dp("data"))
    params = {"w": np.ones((4, 1), np.float32), "table": leaf}
    for make in (init, lambda params, key: init.abstract(params)):
        with type_error(
            "init: every leaf of the parameters must be a real floating-point array, which the optimizer trains; "
            f"leaf table is {name}. Pass values that you do not train in the batch, or let the loss close over them "
            "(eqx.partition and nnx.split take them out of a module); split a complex leaf into its real and "
            "imaginary parts."
        ):
            make(params, jax.random.key(0))


def test_an_abstract_mesh_holds_no_state():
    options = {"mesh": sk.abstract_mesh(data=8), "plan": sk.dp("data")}
    init, _ = sk.make_train_step(sk.value_and_grad(lambda *_: 0.0), optax.sgd(1.0), **options)
    for params in (jnp.ones(8), lambda key: jnp.ones(8)):
        with value_error(
            "init: the mesh must have devices; got an abstract mesh of data=8. Call init.abstract(params), or make the "
            "step over sk.make_mesh(data=8)."
        ):
            init(params, jax.random.key(0))
        assert init.abstract(params).params.shape == (8,)
