"""What the first call of a step refuses: losses that mix examples, and programs with other numbers than one device."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import shardkit as sk
from shardkit.steps.whole_batch import LossOfWholeBatch, Sent
from support.training import lenient

RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(4, 3)).astype("f")}
BATCH = {"x": RNG.normal(size=(16, 4)).astype("f"), "y": RNG.normal(size=(16, 3)).astype("f")}


def errors(params, batch):
    return (batch["x"] @ params["w"] - batch["y"]) ** 2


def right(params, batch, keys):
    return sk.Mean.of(errors(params, batch))


def contrastive(params, batch, keys):
    return sk.Mean.of(-jnp.diag(jax.nn.log_softmax(batch["x"] @ params["w"] @ batch["y"].T)))


def gathered(params, batch, keys):
    """The negatives of all devices, with the place of this device's examples among them."""
    y = sk.all_gather(batch["y"], "data")
    first = sk.axis_index("data") * len(batch["x"])
    logits = jax.nn.log_softmax(batch["x"] @ params["w"] @ y.T)
    return sk.Mean.of(-logits[jnp.arange(len(logits)), first + jnp.arange(len(logits))])


def ordered(params, batch, keys):
    """Its trace does not show that it adds: a sum does not depend on the order."""
    return sk.Mean.of(jnp.sort(errors(params, batch).mean(-1)))


def new_head(params, batch, keys):
    """A difference from the mean of the batch that a head of zeros hides in the loss, and not in the gradient."""
    x = batch["x"] - batch["x"].mean(0, keepdims=True)
    return sk.Mean.of((x @ params["w"] - batch["y"]) ** 2)


def stepped(loss, batch=BATCH, params=PARAMS, plan=None, sizes=None, local=False, carried=None, **options):
    sizes = sizes or {"data": 4}
    mesh = sk.make_mesh(jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)
    job = {"mesh": mesh, "plan": plan or sk.dp("data"), "donate": False, **options}
    init, step = sk.make_train_step(sk.value_and_grad(loss, local=local), optax.sgd(0.1), **job)
    return step, init(params, jax.random.key(0), carried), batch


def refused(loss, *args, again=True, **options):
    step, state, batch = stepped(loss, *args, **options)
    with pytest.raises(ValueError) as error:
        step(state, batch)
    if again:  # nothing has run
        with pytest.raises(ValueError, match=re.escape(str(error.value))):
            step(state, batch)
    return str(error.value)


# What alone finds a loss of the whole batch that each device computes of its own examples.
def test_a_loss_that_mixes_examples_in_full():
    message = re.sub(r"py:\d+", "py:N", refused(contrastive))
    assert re.fullmatch(
        r"step: the loss must add over its examples, because each device computes that of its own; dot_general pairs "
        r"every example with every other at test_first_call.py:N \(contrastive\), so the loss of the examples of two "
        r"devices is [\d.]+, and not the mean of theirs, [\d.]+. Return sk.Mean\(total, weight\) of sums over "
        r"examples, send what other examples need, as sk.all_gather does, or pass make_train_step\(..., "
        r"examples='mixed'\) if each device's own examples are meant to meet.",
        message,
    )


MASTER = sk.Precision(param=jnp.bfloat16, compute=jnp.bfloat16, master=jnp.float32)
STACKED = jax.tree.map(lambda x: np.stack([x, x]), BATCH)
WAYS = {
    "fsdp": {"plan": sk.fsdp("data", min_size=1)},
    "accumulated": {"accumulate": 2, "sizes": {"data": 1}},
    "grouped": {"deterministic": 4, "sizes": {"data": 2}},
    "bf16": {"precision": "bf16"},
    "several steps": {"steps": 2, "batch": STACKED},
    "beside another axis": {"sizes": {"data": 2, "model": 2}},
    "one example a device": {"sizes": {"data": 8}, "batch": jax.tree.map(lambda x: x[:8], BATCH)},
    "as on one device": {"local": True},
    "a loss scale": {"precision": "fp16", "nonfinite": "stop"},
    "a ring": {"plan": sk.zero1("data", min_size=1, reduce=sk.algorithms.ring())},
    "manual": {"sizes": {"data": 2, "model": 2}, "manual": "data"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:step. .*all do the same work")
def test_under_every_option(way):
    """A loss that mixes is refused, one whose trace does not tell and one that adds train without a word."""
    assert "pairs every example with every other" in refused(contrastive, again=False, **WAYS[way])
    step, state, batch = stepped(ordered, **WAYS[way])
    state, _ = step(state, batch)
    step(state, batch)
    step, state, batch = stepped(right, **WAYS[way])  # as every other test's loss, which train after it
    step._first(step.trace(state, batch), step._arguments(state, batch))


def test_with_carried_state():
    """It is the same for all examples, and reaches both ways in which a loss is looked at."""
    centers = np.ones((1, 4), np.float32)

    def centered(own, params, batch, keys, carried):
        center = batch["x"].mean(0, keepdims=True) if own else carried
        return ordered(params, {**batch, "x": batch["x"] - center}, keys)

    def with_own(params, batch, keys, carried):
        return centered(True, params, batch, keys, carried)

    def with_carried(params, batch, keys, carried):
        return centered(False, params, batch, keys, carried)

    assert "combines each example with a sum over all" in refused(with_own, carried=centers)
    step, state, batch = stepped(with_carried, carried=centers)
    step(state, batch)


# What alone finds that a batch is read as it stands, and not as jit takes it.
def test_numbers_of_python_and_long_integers_of_numpy():
    def loss(params, batch, keys):
        rows = jnp.arange(len(batch["own"])) + batch["own"] * 0
        return sk.Mean.of(batch["scale"] * jnp.sort(errors(params, batch)[rows, batch["label"]]))

    own, label = np.arange(16), np.arange(16) % 3
    batch = BATCH | {"own": own, "label": label, "scale": 2.0}
    step, state, batch = stepped(lambda *args: right(*args) + loss(*args) * 0.0, batch)
    step(state, batch)


def test_explicit_axes():
    mesh = sk.make_mesh(jax.devices()[:2], axis_types=AxisType.Explicit, data=2)
    batch = sk.shard(BATCH, mesh, jax.P("data"))
    assert "pairs every example" in refused(contrastive, batch, mesh=mesh)
    step, state, batch = stepped(ordered, batch, mesh=mesh)
    step(state, batch)


def test_what_is_meant_passes():
    for loss, options in [
        (contrastive, {"examples": "mixed"}),
        (contrastive, {"check": False}),
        (contrastive, {"sizes": {"data": 1}}),  # one device has all examples
        (gathered, {}),
    ]:
        step, state, batch = stepped(loss, **options)
        step(state, batch)
    losses = []
    for loss, sizes in [(gathered, {"data": 4}), (contrastive, {"data": 1})]:
        step, state, batch = stepped(loss, sizes=sizes)
        losses.append(step(state, batch)[1]["loss"])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_what_the_gradient_alone_shows_is_found_at_parameters_nearby():
    message = refused(new_head, params={"w": np.zeros((4, 3), "f")})
    assert "combines each example with a sum over all" in message and " at parameters nearby, and not" in message


def guarded(params, batch, keys):
    loss = jnp.mean(errors(params, batch))
    return jnp.where(jnp.isfinite(loss), loss, 0.0)


def skipping(params, batch, keys):
    """Skips a batch with an error above the largest of the first batch."""
    return jnp.mean(errors(params, batch)) * jnp.where(jnp.any(errors(params, batch) > 40), 0.0, 1.0)


def doubled(params, batch, keys):
    """Doubles the loss of a batch with an error of any size that is not tiny, which each part of the first has."""
    return jnp.mean(errors(params, batch)) * jnp.where(jnp.any(errors(params, batch) > 5), 2.0, 1.0)


def of_weight_at_least_one(params, batch, keys):
    weight = (batch["y"][:, 0] != 0).astype(jnp.float32)
    return sk.Mean(jnp.sum(errors(params, batch).mean(-1) * weight), jnp.maximum(weight.sum(), 1.0))


def guarded_by_example(params, batch, keys):
    error = errors(params, batch).mean(-1)
    return sk.Mean.of(jnp.sort(jnp.where(jnp.isnan(error), 0.0, error)))


# What alone finds two means, one of which is NaN for planted numbers, while the other is only rounded.
def test_a_sum_of_means_of_which_one_is_not_a_number():
    def loss(params, batch, keys):
        of_parameters = sk.Mean(jnp.sin(params["w"]).sum() * 0.1, 1)
        return of_parameters + ordered(params, batch, keys)

    step, state, batch = stepped(loss)
    step(state, batch)


# What alone finds comparisons over the examples that go one way in both parts of the first batch, and another later.
@pytest.mark.parametrize(
    "loss, how",
    [
        (guarded, "is nan where those of one are NaN"),
        (skipping, "where those of one are eight times as large"),
        (doubled, "where those of one are an eighth"),
        (of_weight_at_least_one, "where those of one are zeros"),
    ],
)
@pytest.mark.parametrize("way", ["fsdp", "accumulated"])
def test_what_only_a_later_batch_would_show_is_refused(loss, how, way):
    message = refused(loss, again=False, **WAYS[way])
    assert "applied to a sum over the examples" in message or "is taken over the examples" in message
    assert how.removeprefix("is nan ") in message
    step, state, batch = stepped(guarded_by_example, **WAYS[way])  # whose trace does not show that it adds
    step(state, batch)


def without_a_word(call, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call(*args)


def rooted(params, batch, keys):
    """The root of a mean, beside metrics that add."""
    error = errors(params, batch)
    count = sk.Mean(jnp.sum(error > 1, axis=0).astype(jnp.float32), len(error))
    return sk.Mean.of(error), {"rooted": jnp.sqrt(jnp.mean(error)), "count": count, "mean": jnp.mean(error)}


def of_metrics_alone(params, batch, keys):
    loss, metrics = rooted(params, batch, keys)
    return loss, {"count": metrics["count"], "mean": metrics["mean"]}


ROOTED = (
    r"{}: the metric 'rooted' must add over its examples, because each device computes that of its own; sqrt is "
    r"applied to a sum over the examples at test_first_call.py:\d+ \(rooted\), so that of the examples of two {} is "
    r"[\d.]+, and not the mean of theirs, [\d.]+. Return sk.Mean\(total, weight\) of sums over examples, or compute it "
    r"from such means after the call."
)


# What alone finds a metric that is another number on each mesh: nobody trains by it, and it stands in the paper.
@pytest.mark.parametrize(
    "way, two", [("fsdp", "devices"), ("accumulated", "microbatches"), ("grouped", "microbatches")]
)
def test_a_metric_that_mixes_is_said(way, two):
    step, state, batch = stepped(rooted, **WAYS[way])
    with pytest.warns(UserWarning) as told:
        state, _ = step(state, batch)
    (warning,) = told
    assert re.fullmatch(ROOTED.format("step", two), str(warning.message)) and warning.filename == __file__
    without_a_word(step, state, batch)
    step, state, batch = stepped(of_metrics_alone, **WAYS[way])
    without_a_word(step, state, batch)


# What alone finds an evaluation whose loss, or metric, is another number on each mesh.
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("plan", [sk.dp("data"), sk.fsdp("data", min_size=1)], ids=["dp", "fsdp"])
def test_an_evaluation_says_what_mixes(plan, axis_type):
    mesh = sk.make_mesh(jax.devices()[:4], axis_types=axis_type, data=4)
    batch = sk.shard(BATCH, mesh, jax.P("data"))
    params = sk.make_train_step(sk.value_and_grad(right), optax.sgd(0.1), mesh=mesh, plan=plan)[0](
        PARAMS, jax.random.key(0)
    ).params

    def evaluate(loss):
        return sk.make_eval_step(loss, mesh=mesh, plan=plan)

    once = evaluate(rooted)
    with pytest.warns(UserWarning) as told:
        once(params, batch)
    (warning,) = told
    assert re.fullmatch(ROOTED.format("evaluate", "devices"), str(warning.message)) and warning.filename == __file__
    without_a_word(once, params, batch)
    with pytest.warns(UserWarning, match="evaluate: the loss must add over its examples, .* pairs every example"):
        evaluate(contrastive)(params, batch)
    without_a_word(evaluate(of_metrics_alone), params, batch)
    without_a_word(evaluate(ordered), params, batch)  # whose trace does not show that it adds
    without_a_word(evaluate(gathered), params, batch)


# What alone finds planted numbers in a loop that the numbers end: on these it may never end.
def test_a_loop_is_compared_with_the_first_batch_alone():
    def loop(loss):
        def looped(params, batch, keys):
            halved = jax.lax.while_loop(lambda x: jnp.any(x > 1), lambda x: x / 2, jnp.abs(batch["x"]))
            return loss(params, batch | {"x": batch["x"] + 0 * halved}, keys)

        return looped

    without_a_word(*stepped(loop(guarded), local=True))
    assert "the examples decide when a loop ends" in refused(loop(contrastive), local=True)


# What alone finds a callback that is called with the examples of two devices, or with planted ones.
@pytest.mark.parametrize("callback", [jax.pure_callback, jax.experimental.io_callback])
def test_a_loss_that_calls_python_is_not_compared(callback):
    shapes = set()

    def note(x):
        shapes.add(x.shape)
        return x

    def called(params, batch, keys):
        x = callback(note, jax.ShapeDtypeStruct(batch["x"].shape, batch["x"].dtype), batch["x"])
        return ordered(params, batch | {"x": jax.lax.stop_gradient(x)}, keys)

    step, state, batch = stepped(called, local=True)
    jax.block_until_ready(without_a_word(step, state, batch))
    assert shapes == {(4, 4)}


# What alone finds a loss near 0 whose rounding is a large share of it.
def test_a_loss_of_rounding_alone():
    def loss(params, batch, keys):
        error = 1e-3 * errors(params, batch).mean(-1)
        return sk.Mean(jnp.sort(error).sum() - error.sum(), len(error))

    without_a_word(*stepped(loss))


# What alone finds that a metric that is sent hides a loss that mixes.
def test_what_a_metric_sends_is_its_own_affair():
    def loss(params, batch, keys):
        return contrastive(params, batch, keys), {"all": sk.all_reduce(jnp.mean(batch["x"]), "data") / 4}

    assert "pairs every example with every other" in refused(loss)


def without_place(params, batch, keys):
    """The negatives of all devices, among which each takes its own examples for the first."""
    y = sk.all_gather(batch["y"], "data")
    logits = jax.nn.log_softmax((batch["x"] @ params["w"] @ y.T).astype(jnp.float32))
    return sk.Mean.of(-logits[jnp.arange(len(logits)), jnp.arange(len(logits))])


def is_said_of_one_device(told):
    """The two losses that the only warning names."""
    (warning,) = told
    found = re.fullmatch(
        r"step: test_first_call.py:\d+ \(\w+\): the loss, which sends over 'data' here, must be the same on every "
        r"mesh; it is ([\d.]+) on this one, and ([\d.]+) where one device has the whole batch. Find the place of a "
        r"device's own examples among all by sk.axis_index, and sum over all devices what counts or divides, or pass "
        r"make_train_step\(..., examples='mixed'\) if each device is meant to compute what it does, as with a capacity "
        r"of each device in a mixture of experts.",
        str(warning.message),
    )
    assert warning.filename == __file__
    return [float(number) for number in found.groups()]


# What alone finds a loss that sends, and is another number on each mesh: its trace shows nothing wrong.
@pytest.mark.parametrize("way", ["dp", "fsdp", "bf16", "several steps", "manual"])
@pytest.mark.filterwarnings("ignore:step. .*all do the same work")
def test_a_loss_that_sends_is_compared_with_one_device(way):
    options = WAYS.get(way, {})
    step, state, batch = stepped(without_place, **options)
    if way == "manual":  # other axes are left to the partitioner
        without_a_word(step, state, batch)
        return
    with pytest.warns(UserWarning, match="where one device has the whole batch") as told:
        state, metrics = step(state, batch)
    of_mesh, of_one = is_said_of_one_device(told)
    np.testing.assert_allclose(np.ravel(metrics["loss"])[0], of_mesh, rtol=1e-5)
    rtol = 1e-2 if way == "bf16" else 1e-5
    np.testing.assert_allclose(np.asarray(contrastive(PARAMS, BATCH, None).total) / 16, of_one, rtol=rtol)
    without_a_word(step, state, batch)
    step, state, batch = stepped(gathered, **options)
    without_a_word(step, state, batch)


def test_a_loss_that_sends_is_not_compared_where_it_is_meant_or_cannot_be():
    def in_four(params, batch, keys):  # one device cannot send to device 3
        moved = jax.lax.ppermute(batch["y"], "data", [(0, 1), (1, 2), (2, 3), (3, 0)])
        return right(params, batch | {"y": moved}, keys)

    def with_noise(params, batch, keys):
        noise = jax.random.normal(sk.fold_axis(jax.random.key(1), "data"), batch["x"].shape)
        scale = jax.lax.stop_gradient(sk.all_reduce(jnp.sum(batch["y"] ** 2), "data"))
        return sk.Mean.of(scale * errors(params, batch | {"x": batch["x"] + noise}))

    without_a_word(*stepped(without_place, examples="mixed"))
    without_a_word(*stepped(without_place, check=False))
    without_a_word(*stepped(in_four))
    without_a_word(*stepped(with_noise))


ROUNDED, *OTHERS_ROUNDED = (
    sk.fsdp("data", min_size=1, gather=sk.algorithms.compressed(dtype)) for dtype in (jnp.int8, "mxfp4", "nvfp4")
)
WIDE = {"w": RNG.normal(size=(4, 64)).astype("f")}


# What alone finds a compressed gather taken for what the loss sends, or its rounding for a mistake of the loss.
def test_weights_that_a_plan_rounds_are_not_compared_with_one_device():
    batch = BATCH | {"y": RNG.normal(size=(16, 64)).astype("f")}
    for loss, plan in ((right, ROUNDED), (gathered, ROUNDED), *((right, plan) for plan in OTHERS_ROUNDED)):
        step, state, batch = stepped(loss, batch, WIDE, plan=plan)
        without_a_word(step, state, batch)
        _, metrics = step(state, batch)
        exact_step, state, batch = stepped(loss, batch, WIDE, plan=sk.fsdp("data", min_size=1))
        _, exact = exact_step(state, batch)
        difference = abs(float(metrics["loss"]) - float(exact["loss"])) / abs(float(exact["loss"]))
        assert 1e-5 < difference < 0.05  # more than the rounding for which it would be taken, and less than a mistake


# What alone finds that a penalty of weights that a plan gathers compressed is taken for one that the loss made equal.
def test_a_penalty_of_rounded_weights_counts_on_each_device():
    def loss(params, batch, keys):
        mean = right(params, batch, keys)
        return sk.Mean(mean.total + jnp.sum(params["w"].astype(jnp.float32) ** 2), mean.weight)

    batch = BATCH | {"y": RNG.normal(size=(16, 64)).astype("f")}
    for plan in (sk.fsdp("data", min_size=1), ROUNDED):
        step, state, batch = stepped(loss, batch, WIDE, plan=plan, examples="mixed")
        with pytest.warns(UserWarning, match="it counts once for each of them, unless it is divided by their number"):
            step(state, batch)


# What alone finds carried state, padding or Explicit axes that keep a loss from being computed on one device.
def test_a_loss_that_sends_on_other_meshes():
    def with_carried(params, batch, keys, carried):
        return without_place(params, batch | {"x": batch["x"] + carried["w"][:, :1].T}, keys)

    mesh = sk.make_mesh(jax.devices()[:4], axis_types=AxisType.Explicit, data=4)
    batch = sk.shard(BATCH, mesh, jax.P("data"))
    padded = {"plan": sk.fsdp("data", min_size=1, uneven="pad", rules=lambda path, shape: 1)}
    for train in (stepped(with_carried, carried=PARAMS, **padded), stepped(without_place, batch, mesh=mesh)):
        with pytest.warns(UserWarning) as told:
            train[0](*train[1:])
        is_said_of_one_device(told)


# What alone finds numbers near 0 that are compared as shares: normalized advantages add up to nothing.
def test_a_loss_near_zero_that_sends():
    def loss(params, batch, keys):
        advantage = 1e2 * batch["y"][:, 0]
        mean = sk.all_reduce(jnp.sum(advantage), "data") / 16
        return sk.Mean.of(advantage - mean)

    without_a_word(*stepped(loss))


# What alone finds the rounding of 16 bits that is taken for a mistake.
@pytest.mark.check
def test_losses_of_16_bits_may_differ_more():
    sent = Sent("loss.py:1", False, ("data",), ("data",), of_tokens=False, has_16_bits=True, on_cpu=True)
    without_a_word(LossOfWholeBatch(1.0, sent).compare, {"loss": np.float32(1.01)})
    with pytest.warns(UserWarning, match="it is 1.01 on this one, and 1 where one device has the whole batch"):
        LossOfWholeBatch(1.0, sent._replace(has_16_bits=False)).compare({"loss": np.float32(1.01)})


# What alone finds the rounding of a GPU's products taken for a mistake, and a new model's mistake taken for it.
@pytest.mark.check
def test_losses_of_other_devices_may_differ_more():
    on_cpu = Sent("loss.py:1", False, ("data",), ("data",), of_tokens=False, has_16_bits=False, on_cpu=True)
    without_a_word(LossOfWholeBatch(1.0, on_cpu._replace(on_cpu=False)).compare, {"loss": np.float32(1.001)})
    with pytest.warns(UserWarning, match="it is 1.001 on this one, and 1 where one device has the whole batch"):
        LossOfWholeBatch(1.0, on_cpu).compare({"loss": np.float32(1.001)})


# What alone finds a trace that uses up the check, so that the first call with numbers goes unseen.
def test_a_step_inside_of_jit_is_read_and_compared_later():
    step, state, batch = stepped(contrastive)
    assert jax.eval_shape(step, state, batch)[1]["loss"].shape == ()  # no numbers are there to compare
    with pytest.raises(ValueError, match="pairs every example with every other"):
        step(state, batch)


def test_what_is_inside_of_jit_has_no_numbers_yet():
    """Neither with arguments that are constants of it, nor with carried state alone that it passes."""
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        mesh = sk.make_mesh(jax.devices()[:4], axis_types=axis_type, data=4)
        step, state, batch = stepped(contrastive, mesh=mesh)
        jax.jit(lambda step=step, state=state, batch=batch: step(state, batch)[1])()
        with pytest.raises(ValueError, match="pairs every example with every other"):
            step(state, batch)

    def with_carried(params, batch, keys, carried):
        return contrastive(params, {**batch, "x": batch["x"] - carried}, keys)

    mesh = sk.make_mesh(jax.devices()[:4], data=4)
    evaluate = sk.make_eval_step(with_carried, mesh=mesh, plan=sk.dp("data"))
    without_a_word(jax.jit(lambda carried: evaluate(PARAMS, BATCH, carried)), np.ones((1, 4), "f"))
    with pytest.warns(UserWarning, match="pairs every example with every other"):
        evaluate(PARAMS, BATCH, np.ones((1, 4), "f"))


# What alone finds a metric of each layer that is said once for each.
def test_metrics_of_one_line_are_said_once():
    def loss(params, batch, keys):
        error = errors(params, batch)
        roots = {f"layer {number}": jnp.sqrt(jnp.mean(number * error)) for number in range(1, 4)}
        return sk.Mean.of(error), {"roots": roots, "largest": jnp.max(error)}

    step, state, batch = stepped(loss)
    with pytest.warns(UserWarning) as told:
        step(state, batch)
    roots, largest = sorted(str(warning.message) for warning in told)[::-1]
    assert roots.startswith("step: the metric 'roots.layer 1' (and 2 more of that line) must add over its examples")
    assert largest.startswith("step: the metric 'largest' must add over its examples")


# What alone finds an evaluation that fails where only its check does.
def test_an_evaluation_never_fails_by_its_check():
    def of_four(params, batch, keys):
        assert len(batch["x"]) == 4
        return contrastive(params, batch, keys)

    mesh = sk.make_mesh(jax.devices()[:4], data=4)
    evaluate = sk.make_eval_step(of_four, mesh=mesh, plan=sk.dp("data"))
    assert without_a_word(evaluate, PARAMS, BATCH)["loss"] > 0


# What alone finds a draw that is the same for the columns of all devices, where nothing runs lint.
def test_what_lint_finds_wrong_is_refused():
    def dropped(params, batch, keys):
        h = sk.layers.column_linear(batch["x"], params["up"], "model")
        h = sk.dropout(h, keys, rate=0.5)
        return sk.Mean.of(sk.layers.row_linear(h, params["down"], "model"))

    rules = {"up": jax.P(None, "model"), "down": jax.P("model")}
    params = {"up": np.ones((4, 6), "f"), "down": np.ones((6, 4), "f")}
    plan = sk.chain(sk.dp("data"), sk.tp("model", rules))
    options = {"plan": plan, "sizes": {"data": 2, "model": 2}, "params": params}
    message = refused(dropped, **options)
    assert re.fullmatch(
        r"step: test_first_call.py:\d+ \(.*dropped\): float32\[8,3\], which differs along 'model', is combined with "
        r"random numbers that are equal there, because their key is. Draw from a key for each example or token, for "
        r"the same numbers on every mesh, or fold the device's index into the key with fold_axis\(key, 'model'\), for "
        r"numbers that depend on the size of the axis. Pass make_train_step\(..., check=False\) to run it as it is.",
        message,
    )
    step, state, batch = stepped(dropped, check=False, **options)
    step(state, batch)


def test_a_proof_that_fails_says_what_the_first_call_would():
    grad_fn = sk.value_and_grad(contrastive)
    mesh = sk.make_mesh(jax.devices()[:4], data=4)
    job = {"mesh": mesh, "plan": sk.dp("data"), "params": PARAMS, "batches": [BATCH]}
    with pytest.raises(
        AssertionError, match=r"the loss must equal one device's; .* dot_general pairs every example with"
    ):
        sk.testing.assert_same_training(grad_fn, grad_fn, optax.sgd(0.1), **job)


# What alone finds an optimizer that moves a leaf without a gradient
@pytest.mark.parametrize(
    "options",
    [
        {"plan": sk.dp("data")},
        {"plan": sk.zero1("data", min_size=1), "accumulate": 2},
        {"plan": sk.fsdp("data", min_size=1, uneven="pad"), "precision": MASTER},
        {"plan": sk.dp("data"), "steps": 2},
    ],
    ids=["dp", "zero1-accumulated", "fsdp-padded-master", "steps"],
)
def test_frozen_leaves_stay_whatever_the_optimizer_does(options):
    params = {"base": {"w": np.full((4, 3), 2, "f")}, "head": np.ones((3, 3), "f")}

    def loss(params, batch, keys):
        return sk.Mean.of((batch["x"].astype(params["head"].dtype) @ params["base"]["w"] @ params["head"]) ** 2)

    grad_fn = sk.value_and_grad(loss, trained={"base": False, "head": True})
    mesh = sk.make_mesh(jax.devices()[:2], data=2)
    init, step = sk.make_train_step(grad_fn, lenient(optax.adamw(0.1, weight_decay=0.1)), mesh=mesh, **options)
    state = init(params, jax.random.key(0))
    for _ in range(2):
        state, _ = step(state, STACKED if "steps" in options else BATCH)
    found = jax.tree.map(lambda x: np.asarray(x, np.float32), sk.unpadded(state.params))
    np.testing.assert_array_equal(found["base"]["w"], params["base"]["w"])
    assert np.all(np.abs(found["head"] - params["head"]) > 1e-3)
    for copy in [state.opt_state.copy] if hasattr(state.opt_state, "copy") else []:
        np.testing.assert_array_equal(sk.unpadded(copy)["base"]["w"], params["base"]["w"])


def test_a_frozen_stack_of_a_pipeline():
    """Its stages hold the layers in another order, with rows of padding."""
    layers, stages = 3, 2

    def stage(layers, x, keys):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0]

    def head(shared, x, batch):
        return sk.Mean.of((x @ shared["head"]) ** 2)

    pipe = sk.pipeline(sk.schedules.lockstep(stages, 2), "stage", layers_per_stage=(1, 2))
    trained = {"layers": False, "head": True}
    grad_fn = pipe.value_and_grad(lambda shared, batch, keys: batch["x"], stage, head, trained=trained)
    params = {"layers": np.full((layers, 4, 4), 0.5, "f"), "head": np.ones((4, 1), "f")}
    mesh = sk.make_mesh(jax.devices()[:stages], stage=stages)
    optimizer = lenient(optax.adamw(0.1, weight_decay=0.1))
    init, step = sk.make_train_step(grad_fn, optimizer, mesh=mesh, plan=pipe.plan)
    state, _ = step(init(params, jax.random.key(0)), {"x": BATCH["x"]})
    found = sk.unpadded(state.params)
    np.testing.assert_array_equal(found["layers"], params["layers"])
    assert np.all(np.abs(found["head"] - params["head"]) > 1e-3)


def test_a_leaf_that_one_of_two_gradients_trains_is_not_frozen():
    parts = [sk.value_and_grad(right, trained={"w": flag, "b": True}) for flag in (False, True)]

    def both(params, batch, keys, *, scale=1):
        (loss, aux, first), (_, _, second) = (part(params, batch, keys, scale=scale) for part in parts)
        return loss, aux, jax.tree.map(jnp.add, first, second)

    params = {"w": PARAMS["w"], "b": np.ones(3, "f")}
    mesh = sk.make_mesh(jax.devices()[:2], data=2)
    init, step = sk.make_train_step(both, optax.sgd(0.1), mesh=mesh, plan=sk.dp("data"))
    state, _ = step(init(params, jax.random.key(0)), BATCH)
    assert np.abs(np.asarray(state.params["w"]) - PARAMS["w"]).max() > 1e-3

    frozen = sk.value_and_grad(
        lambda tree, batch, keys: right(tree["p"], batch, keys), trained={"p": {"w": False, "b": True}}
    )

    def inside(params, batch, keys, *, scale=1):
        loss, aux, grads = frozen({"p": params}, batch, keys, scale=scale)
        return loss, aux, grads["p"]

    init, step = sk.make_train_step(inside, optax.sgd(0.1), mesh=mesh, plan=sk.dp("data"))
    with pytest.raises(ValueError, match="must be passed the parameters of the step, which keeps frozen"):
        step(init(params, jax.random.key(0)), BATCH)
