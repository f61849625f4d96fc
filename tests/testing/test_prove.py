"""prove: what it prints, and that each of its laws finds what it is there for."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit._jax.jaxprs import PLAN, TOTALS, kind_of, mesh_axes, walk
from shardkit.analysis.hlo.proto import read_groups
from shardkit.plans.storage import Padded
from shardkit.testing import LAWS, Row, laws, one_device, prove
from shardkit.testing.exact.stablehlo import listed_groups
from shardkit.testing.program import Program, Recorded, _rescale, recording
from support.refusals import refused, type_error, value_error
from support.training import lenient

NEWER = jax.__version_info__ >= (0, 11)
KEY = jax.random.key(1)
PARAMS = {"w": np.random.default_rng(0).normal(size=(8, 4)).astype("f"), "b": np.zeros(4, "f")}
DP4 = Row({"data": 4}, sk.dp("data"))


def batch(step):
    rng = np.random.default_rng(step)
    return {"x": rng.normal(size=(16, 8)).astype("f"), "weight": rng.integers(0, 3, 16).astype("f")}


BATCHES = [batch(step) for step in range(3)]


def loss_fn(params, batch, keys):
    x = sk.dropout(batch["x"], keys, 0.2)
    error = jnp.sum((jnp.tanh(x @ params["w"] + params["b"][None]) - 1) ** 2, axis=-1)
    return sk.Mean.of(error, batch["weight"]), {"error": sk.Mean.of(error)}


OWN = sk.value_and_grad(loss_fn)


def proved(step, *rows, optimizer=None, **options):
    return prove(
        step, OWN, rows=rows, params=PARAMS, batches=BATCHES, optimizer=optimizer or optax.sgd(0.1, 0.9), **options
    )


def broken(law, step, row=DP4, **options):
    lines = refused(lambda: proved(step, row, laws=[law], **options), AssertionError).splitlines()
    assert lines[0] == "prove: 1 of 1 do not hold:" and len(lines) == 2
    return lines[1]


# proves N8, F72
def test_all_laws_on_two_plans():
    sharded = Row({"data": 2, "fsdp": 2}, sk.chain(sk.dp("data"), sk.fsdp("fsdp", min_size=1)), accumulate=2)
    proof = proved(OWN, DP4, sharded)
    assert str(proof).splitlines()[0].split() == ["row", *(law.__name__ for law in LAWS)]
    assert str(proof).splitlines()[1].split() == ["data=4:", "dp('data')", *["holds"] * len(LAWS)]
    assert str(proof).splitlines()[2].startswith("data=2, fsdp=2: fsdp('fsdp') + dp('data'), accumulate=2  holds")


def test_a_step_of_ones_own_and_a_law_of_ones_own():
    def built(row):
        mesh = sk.make_mesh(jax.devices()[:4], **row.mesh)
        return sk.make_train_step(OWN, row.optimizer, mesh=mesh, plan=row.plan)

    def few_leaves(program, reference):
        return f"{len(jax.tree.leaves(program.ran.state.params))} leaves after {len(reference.steps)} steps"

    proof = proved(built, DP4, DP4, laws=[laws.same_numbers, few_leaves])
    assert str(proof).splitlines() == [
        "row                     same_numbers  few_leaves",
        "data=4: dp('data') (1)  holds         (1)",
        "data=4: dp('data') (2)  holds         (1)",
        "(1) few_leaves: 2 leaves after 3 steps",
    ]


def test_one_law_that_breaks_is_enough_wherever_it_stands():
    def breaks(program, reference):
        raise AssertionError("it breaks")

    def holds(program, reference):
        return ""

    for order in ([breaks, holds], [holds, breaks], [holds, breaks, holds]):
        assert refused(lambda: proved(OWN, DP4, laws=order), AssertionError).splitlines() == [
            f"prove: 1 of {len(order)} do not hold:",
            "- data=4: dp('data'), breaks: on mesh data=4 with plan dp('data'), it breaks",
            "To run the first of these alone, pass rows=[rows[0]] and laws=[breaks].",
        ]


def test_the_error_says_how_to_run_the_first_broken_law_alone():
    def wrong(params, batch, keys, *, scale=1):
        loss, aux, grads = OWN(params, batch, keys, scale=scale)
        return loss, aux, jax.tree.map(lambda g: 2 * g, grads)

    rows = [DP4, DP4._replace(grad_fn=wrong)]
    message = refused(lambda: proved(OWN, *rows, laws=[laws.equal_copies, laws.same_numbers]), AssertionError)
    hint = message.splitlines()[-1]
    assert hint == "To run the first of these alone, pass rows=[rows[1]] and laws=[sk.testing.laws.same_numbers]."
    alone = refused(lambda: proved(OWN, rows[1], laws=[laws.same_numbers]), AssertionError)
    assert alone.splitlines()[1].replace("dp('data')", "dp('data') (2)", 1) == message.splitlines()[1]


# proves N49: also behind the compiler
def test_the_compiled_step_is_the_traced_one(monkeypatch):
    """Catches a law that compares the compiled step with itself, or that does not read its groups of devices."""
    assert proved(OWN, DP4, laws=[laws.compiled]).verdicts[0].note == ""

    def halve_groups(instruction):
        return [group[:2] for group in read_groups(instruction)] + [group[2:] for group in read_groups(instruction)]

    monkeypatch.setattr(listed_groups, "read_groups", halve_groups)
    foreign = SimpleNamespace(step=jax.jit(OWN))
    assert laws.compiled(foreign, None) == "as compiled: the step must be one of make_train_step"
    text = broken(laws.compiled, OWN)
    assert "of each device is not the reference's for all inputs" in text
    assert "The first value that the reference does not have is that of" in text


# proves N49: with what it assumes
def test_a_constant_that_stands_for_others_is_told():
    """Catches a law that drops the assumptions of a proof."""

    def loss_of(scale):
        return sk.value_and_grad(lambda params, batch, keys: sk.Mean.of(scale(batch["x"] @ params["w"])[:, 0]))

    on_mesh = loss_of(lambda x: x * np.float32(0.123 * 0.777))
    alone = loss_of(lambda x: x * 0.123 * 0.777)
    proof = prove(
        on_mesh,
        alone,
        rows=[DP4],
        params=PARAMS,
        batches=BATCHES,
        optimizer=optax.sgd(0.1),
        laws=[laws.equal_for_all_inputs],
    )
    assert proof.verdicts[0].note == "equal; assumed: the constant 0.0955709964 is 0.123 * 0.777, rounded"


def test_a_constant_that_the_compiler_computed_is_told():
    """Catches a law that drops what the compiler folded."""

    def loss_fn(params, batch, keys):
        x = batch["x"] @ params["w"] * np.float32(0.123) * np.float32(0.777)
        return sk.Mean.of(x[:, 0])

    grad_fn = sk.value_and_grad(loss_fn)
    proof = prove(
        grad_fn, grad_fn, rows=[DP4], params=PARAMS, batches=BATCHES, optimizer=optax.sgd(0.1), laws=[laws.compiled]
    )
    if not NEWER:  # whose XLA leaves the three products as they are
        assert proof.verdicts[0].note.startswith("equal; assumed: the constant ")


# The weight divides out of loss and gradients; a metric far below the loss must not borrow the loss's rounding.
def test_a_weight_or_a_metric_that_is_not_one_devices():
    def small(params, batch, keys):
        loss, aux = loss_fn(params, batch, keys)
        return loss, {"small": sk.Mean(1e-3 * aux["error"].total, aux["error"].weight)}

    own = sk.value_and_grad(small)

    def wrong(what):
        def step(params, batch, keys, *, scale=1):
            loss, aux, grads = own(params, batch, keys, scale=scale)
            if what == "weight":
                loss, grads = sk.Mean(2 * loss.total, 2 * loss.weight), jax.tree.map(lambda g: 2 * g, grads)
            elif what == "metric":
                aux = {"small": sk.Mean(1.004 * aux["small"].total, aux["small"].weight)}
            else:
                aux = aux | {"more": aux["small"]}
            return loss, aux, grads

        row = Row({"data": 2}, sk.dp("data"))
        options = {"rows": [row], "params": PARAMS, "batches": BATCHES[:1], "laws": [laws.same_numbers]}
        return refused(lambda: prove(step, own, optimizer=optax.sgd(0.1), **options), AssertionError)

    text = wrong("weight")
    assert "step 0: the metric 'weight' must equal one device's" in text and "(everywhere 2x one device's)" in text
    assert "step 0: the metric 'small' must equal one device's" in wrong("metric")
    assert wrong("more").endswith(
        "step 0: the metrics must be those of one device; only the mesh returns 'more'. Return the same means from the "
        "loss and from the reference."
    )


# A GradFn that is right wherever scale is 1, and trains a float16 model on gradients that are too small or too large.
@pytest.mark.parametrize("wrong", ["ignored", "squared", "loss"])
def test_a_scale_that_is_not_that_of_the_gradients_alone(wrong):
    def scaled(params, batch, keys, *, scale=1):
        loss, aux, grads = OWN(params, batch, keys, scale={"ignored": 1, "squared": scale * scale}.get(wrong, scale))
        return sk.Mean(loss.total * (scale if wrong == "loss" else 1), loss.weight), aux, grads

    what, factor = {"ignored": ("the gradient of", 2), "squared": ("the gradient of", 0.5)}.get(
        wrong, ("the loss", 0.5)
    )
    text = broken(laws.same_numbers, scaled)
    assert re.search(f"step 0: {what} .*{'everywhere 2x' if factor == 2 else 'everywhere 1/2 of'} one device's", text)
    assert text.endswith(
        "Check the sums in the loss and the axes over which it varies, and that random numbers come from `keys`, and "
        "`scale`, which is 0.5 in a proof and must multiply only the gradients."
    )


def test_copies_that_differ(data8):
    pieces = [jax.device_put(np.float32([i // 7]), d) for i, d in enumerate(data8.devices.flat)]
    whole = jax.make_array_from_single_device_arrays((1,), jax.NamedSharding(data8, P()), pieces)
    trees = {"parameter": {}, "optimizer state": {}, "residual": {}, "metric": {}}
    for name in trees:
        params, opt_state, residuals, metrics = (trees | {name: {"w": whole}}).values()
        state = SimpleNamespace(params=params, opt_state=opt_state, residuals=residuals)
        ran = SimpleNamespace(state=state, metrics=metrics)
        assert refused(lambda: laws.equal_copies(SimpleNamespace(ran=ran), None), AssertionError) == (
            f"the replicas of {name} w must be bitwise equal; those on devices 0 and 7 differ. Look for randomness, a "
            "reduction that one device skips, or an assume_replicated of a value that differs."
        )


# Catches a step whose gradients are equal up to rounding, and not in every bit, where the type says equal.
def test_a_false_assume_replicated_in_a_step_is_found():
    def summed(reduce):
        def grad_fn(params, batch, keys, *, scale=1):
            loss, aux, grads = OWN(params, batch, keys, scale=scale)
            return loss, aux, jax.tree.map(reduce, grads)

        return grad_fn

    def in_its_own_order(g):
        return sk.collectives.assume_replicated(g + sum(sk.shift(g, "data", by=k) for k in (1, 2, 3)), "data")

    right = summed(lambda g: sk.ring.all_reduce(g, "data", replicated=True))
    proved(right, DP4, laws=[laws.same_numbers, laws.equal_copies])
    proved(summed(in_its_own_order), DP4, laws=[laws.same_numbers])
    assert "differ. Look for randomness, a reduction that one device skips, or an assume_replicated of" in broken(
        laws.equal_copies, summed(in_its_own_order)
    )


def test_a_byte_too_many():
    """A loss that sums once more, in the scope of the plan."""

    def summed(params, batch, keys):
        loss, aux = loss_fn(params, batch, keys)
        with jax.named_scope(PLAN):
            total = sk.all_reduce(params["b"], "data")
        return loss, aux | {"norm": sk.Mean(jnp.sum(total), jnp.float32(1))}

    row = DP4._replace(grad_fn=sk.value_and_grad(summed))
    text = broken(laws.census_is_the_closed_form, OWN, row)
    assert text.endswith(
        "the plan must send 216 bytes per device and step over 'data', by its layouts; the census counts 240. Print "
        "sk.census(step, state, batch) to find the missing or extra collective."
    )


# proves N66: what loss, gradients and weights are summed in is a law; a loss in bfloat16 sums in float32 all the same
def test_sums_in_another_dtype():
    bf16 = DP4._replace(precision="bf16", relative=0.1)
    proved(OWN, bf16, laws=[laws.sums_keep_their_dtype])
    proved(
        OWN, DP4._replace(precision=sk.Precision(reduce=jnp.bfloat16), relative=0.1), laws=[laws.sums_keep_their_dtype]
    )

    def summed(params, batch, keys, *, scale=1):  # the user's own sum, before the plan's
        loss, aux, grads = OWN(params, batch, keys, scale=scale)
        return loss, aux, jax.tree.map(lambda g: sk.all_reduce(g.astype(jnp.bfloat16), "data"), grads)

    text = broken(laws.sums_keep_their_dtype, summed)
    says = "sums over devices must keep the dtype that was asked for: those of the loss itself are added in compute "
    says += "float32; all_reduce over 'data' adds in bfloat16 at test_prove.py"
    assert says in text and text.endswith(". Cast before it, or pass a precision that says so.")

    def scoped(scope, what, asked, row):
        def also(params, batch, keys, *, scale=1):
            loss, aux, grads = OWN(params, batch, keys, scale=scale)
            with jax.named_scope(scope):
                half = sk.all_reduce(sk.vary(grads["b"].astype(jnp.bfloat16), "data"), "data")
            return loss, aux | {"half": sk.Mean(jnp.sum(half), 1)}, grads

        text = broken(laws.sums_keep_their_dtype, also, row)
        assert f"asked for: those {what} {asked}; all_reduce over 'data' adds in bfloat16 at " in text

    scoped(PLAN, "of gradients are added in reduce", "float32", bf16)
    scoped(TOTALS, "of losses, metrics and weights are added in", "float32", bf16)


def built_with(change):
    """A step of one's own: that of the builder, changed."""

    def built(row):
        mesh = sk.make_mesh(jax.devices()[:4], **row.mesh)
        return change(sk.make_train_step(OWN, row.optimizer, mesh=mesh, plan=row.plan))

    return built


def test_a_collective_that_the_compiler_adds():
    def normed(made):  # outside shard_map, on parameters in parts
        def step(state, batch):
            state, metrics = made.step(state, batch)
            return state, metrics | {"norm": jnp.sum(state.params["w"] ** 2)}

        return made._replace(step=jax.jit(step))

    row = DP4._replace(plan=sk.fsdp("data", min_size=1))
    text = broken(laws.compiled_as_written, built_with(normed), row)
    assert "the compiler must not add communication; it changed: added: " in text and " all_reduce over 'data'" in text


def test_a_finding_of_the_lint_and_a_program_that_another_process_traces_otherwise():
    def twice(params, batch, keys, *, scale=1):
        loss, aux, grads = OWN(params, batch, keys, scale=scale)
        once = sk.vary(sk.all_reduce(grads["w"], "data"), "data")
        return loss, aux, grads | {"w": sk.all_reduce(once, "data")}

    assert "lint must report nothing; it reports: " in broken(laws.lint_is_silent, twice)

    def first_only(params, batch, keys, *, scale=1):
        loss, aux, grads = OWN(params, batch, keys, scale=scale)
        return loss, aux, jax.tree.map(lambda g: g * 1.0, grads) if jax.process_index() == 0 else grads

    text = broken(laws.processes_agree, first_only)
    assert "all processes must run the same program; lint reports: " in text and "processes 0 and 1 trace" in text


def test_a_state_that_changes_its_dtype_is_not_donated():
    def halved(made):
        def step(state, batch):
            state, metrics = made.step(state, batch)
            return state._replace(params=jax.tree.map(lambda x: x.astype(jnp.float16), state.params)), metrics

        return made._replace(step=jax.jit(step, donate_argnums=0))

    text = broken(laws.donates_the_state, built_with(halved))
    assert re.search(
        r"a step must write its new state in place, 436 bytes per device; it reuses 3\d\d\. Look for a leaf whose "
        r"dtype or layout changes in the step\.$",
        text,
    )


def test_a_second_compile():
    def weak(made):
        init = lambda params, key: made.init(params, key)._replace(step=jnp.asarray(0) * 1)  # noqa: E731
        return made._replace(init=lambda *args: init(*args)._replace(step=jax.device_put(0)))

    text = broken(laws.compiles_once, built_with(weak))
    assert "only the first step may compile; the steps compiled [0, 1, 0] programs." in text


def test_what_is_refused():
    for name, given, remedy in (
        ("row", {"rows": []}, "one or more"),
        ("batch", {"batches": []}, "one for each step"),
        ("law", {"laws": []}, "one or more"),
    ):
        with value_error(f"prove: at least one {name} is needed; got none. Pass {remedy}."):
            prove(OWN, OWN, **{"rows": [DP4], "params": PARAMS, "batches": BATCHES} | given)
    with value_error("prove: relative must be between 0 and 1; got 0.0. Pass for example 1e-5."):
        proved(OWN, DP4._replace(relative=0.0))  # zero is no "by default"
    with type_error(
        "prove: step must be a GradFn, from value_and_grad(loss_fn), or a function of a Row that returns a TrainStep; "
        "got 'loss_fn'. Wrap a loss in value_and_grad."
    ):
        proved(loss_fn, DP4)
    with value_error("one_device: at least one batch is needed; got none. Pass one for each step."):
        one_device(OWN, optax.sgd(1.0), PARAMS, [])
    with value_error(
        "prove: each batch must have an array with its examples along dim 0; got 3. Pass a list of batches, such as "
        "[batch] for one step."
    ):
        prove(OWN, OWN, rows=[DP4], params=PARAMS, batches=[3])
    for field, wrong, says in (
        ("accumulate", "1", "accumulate must be a whole number; got '1'. Pass for example accumulate=1."),
        ("relative", [0.1], "relative must be a number or None; got [0.1]. Pass for example relative=1.0."),
        ("mesh", 8, "mesh must be a mapping of names to sizes of at least 1; got 8. Pass for example {'data': 8}."),
    ):
        with type_error(f"Row: {says}"):
            prove(OWN, OWN, rows=[DP4._replace(**{field: wrong})], params=PARAMS, batches=BATCHES)


@pytest.mark.check
def test_leaves_that_share_a_path_have_bounds_of_their_own():
    """The second had the bound of both: a gradient that is off by 0.5 where 0.1 is allowed held."""
    wanted = {"a": {"b": np.ones(2, "f")}, "a.b": np.ones(2, "f")}
    got = {"a": {"b": np.full(2, 1.5, "f")}, "a.b": np.ones(2, "f")}
    laws._compare("step 0", "the gradient of", got, wanted, {"a": {"b": np.float32(1)}, "a.b": np.float32(0.1)})
    with pytest.raises(AssertionError, match=r"step 0: the gradient of a\.b must equal one device's; .* is 0\.5 at"):
        laws._compare("step 0", "the gradient of", got, wanted, {"a": {"b": np.float32(0.1)}, "a.b": np.float32(1)})


# proves N12
def test_what_is_allowed_follows_from_the_gradients_error():
    """Under Adam a weight whose gradient is all rounding may go either way; every other is held to its digits."""

    def loss(params, batch, keys):
        return sk.Mean.of(jnp.square(batch["x"] @ params["w"]) + 0 * params["idle"][0])

    params = {"w": np.ones(8, "f"), "idle": np.ones(1, "f")}
    rate = 1e-2
    batches = [{"x": each["x"]} for each in BATCHES]
    wanted = one_device(sk.value_and_grad(loss), lenient(optax.adam(rate)), params, batches).steps[-1]
    assert 3 * rate < wanted.params_allowed["idle"][0] < 20 * rate
    assert np.max(wanted.params_allowed["w"]) < 1e-4
    assert wanted.grads_allowed["w"] < 1e-3 * np.max(np.abs(wanted.grads["w"]))


def test_a_program_is_made_once_and_a_recording_optimizer_changes_nothing():
    program = Program.of(DP4, OWN, optax.sgd(0.1), PARAMS, BATCHES, KEY)
    assert program.compiled is program.compiled and len(program.ran.steps) == 3
    assert [taken.compiled for taken in program.ran.steps] == [0, 0, 0]  # the compiled program is the one that runs
    assert int(program.ran.state.step) == 3
    params, grads = {"w": jnp.float32(3)}, {"w": jnp.float32(10)}
    clipped = recording(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    updates, state = clipped.update(grads, clipped.init(params), params)
    assert float(updates["w"]) == -1 and state.grads == grads


NOTHING = "one_device: step 0: the reference must be finite and have a nonzero gradient, or nothing is proved; "
REMEDY = "Pass other parameters or another batch."
PROVE_NOTHING = {
    f"{NOTHING}'the loss', 'b', 'w' are not finite. {REMEDY}": {
        "batches": [{**BATCHES[0], "x": BATCHES[0]["x"] * np.nan}]
    },
    f"{NOTHING}all gradients are zero. {REMEDY}": {"batches": [{**BATCHES[0], "weight": 0 * BATCHES[0]["weight"]}]},
    "prove: steps must be 1 or more and divide the number of batches; got steps=2 and 3 batches. Pass as many "
    "batches as the calls have steps.": {"batches": BATCHES, "steps": 2},
} | {
    f"assert_same_training: relative must be between 0 and 1; got {wrong}. Pass for example 1e-5.": {"relative": wrong}
    for wrong in (0, -1e-5, 1.0, float("inf"))
}


@pytest.mark.parametrize("message, change", PROVE_NOTHING.items())
def test_what_proves_nothing_is_refused(change, message):
    mesh = sk.make_mesh(jax.devices()[:4], data=4)
    given = {"params": PARAMS, "batches": BATCHES[:1]} | change
    with value_error(message):
        sk.testing.assert_same_training(OWN, OWN, optax.sgd(0.1), mesh=mesh, plan=sk.dp("data"), **given)


def test_several_steps_in_one_call_are_proved():
    """The last step of a call is compared, and the losses of all; bytes are those of one step."""
    row = Row({"data": 4}, sk.zero1("data", min_size=1), steps=3)
    proof = proved(OWN, row)
    assert str(proof).splitlines()[1].split() == ["data=4:", "zero1('data'),", "steps=3", *["holds"] * len(LAWS)]

    def forgets_the_second(params, batch, keys):
        mean, aux = loss_fn(params, batch, keys)
        second = jnp.any(batch["x"][0, 0] == BATCHES[1]["x"][:, 0])
        return sk.Mean(mean.total * jnp.where(second, 2.0, 1.0), mean.weight), aux

    wrong = sk.value_and_grad(forgets_the_second)
    said = broken(laws.same_numbers, wrong, row)
    assert "step 1: the loss must equal one device's" in said, said


# A hidden layer of relus has gradients that are nearly zero; Adam moves their weights by the whole rate either way.
@pytest.mark.quick("adam")
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "lion"])
def test_relus_under_adam_are_the_same_training(optimizer):
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(64, 48)).astype("f") / 8, "v": rng.normal(size=(48, 10)).astype("f") / 7}
    batches = [{"x": rng.normal(size=(32, 64)).astype("f"), "y": rng.integers(0, 10, 32)} for _ in range(2)]

    def loss(params, batch, keys):
        logits = jax.nn.relu(batch["x"] @ params["w"]) @ params["v"]
        return sk.Mean.of(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))

    own, mesh = sk.value_and_grad(loss), sk.make_mesh(jax.devices()[:8], data=8)
    with jax.numpy_dtype_promotion("standard"):
        sk.testing.assert_same_training(
            own, own, getattr(optax, optimizer)(1e-3), mesh=mesh, plan=sk.dp("data"), params=params, batches=batches
        )

        def off(params, batch, keys, *, scale=1):
            loss, aux, grads = own(params, batch, keys, scale=scale)
            return loss, aux, jax.tree.map(lambda g: 1.001 * g, grads)

        with pytest.raises(AssertionError, match="the gradient of v must equal one device"):
            sk.testing.assert_same_training(
                off, own, getattr(optax, optimizer)(1e-3), mesh=mesh, plan=sk.dp("data"), params=params, batches=batches
            )


# On a mesh the noise may lie in one element of such a leaf, which lamb then moves by the whole step: 0.0023, and with a
# share for each element 0.0004 was allowed.
def test_a_leaf_of_nothing_but_noise_under_an_optimizer_that_scales_to_a_norm():
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(64, 4)).astype("f"), "shift": rng.normal(size=64).astype("f")}
    batches = [{"x": rng.normal(size=(16, 64)).astype("f"), "y": rng.integers(0, 4, 16)} for _ in range(2)]

    def loss(params, batch, keys):
        logits = batch["x"] @ params["w"] + (batch["x"] @ params["shift"])[:, None]  # changes no probability
        return sk.Mean.of(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))

    with jax.numpy_dtype_promotion("standard"):
        steps = one_device(sk.value_and_grad(loss), optax.lamb(1e-2), params, batches).steps
    before = params
    for step in steps:
        moved = {name: np.linalg.norm(step.params[name] - before[name]) for name in params}
        assert np.all(step.params_allowed["shift"] > moved["shift"])
        assert np.median(step.params_allowed["w"]) < 1e-3 * moved["w"]
        before = step.params


def test_a_call_gets_the_batches_of_its_own_steps():
    """One batch more in a call would be seen by no step of the last call, and by jax only as another shape."""
    batches = [{"x": np.full((2,), i), "y": jnp.full((1,), i)} for i in range(6)]
    for steps, wanted in ((2, [[0, 1], [2, 3], [4, 5]]), (3, [[0, 1, 2], [3, 4, 5]]), (6, [[0, 1, 2, 3, 4, 5]])):
        row = DP4._replace(steps=steps)
        calls = Program(row, sk.abstract_mesh(data=4), row.plan, None, None, PARAMS, batches, KEY).calls
        assert [call["x"][:, 0].tolist() for call in calls] == wanted
        assert [call["y"].shape for call in calls] == [(steps, 1)] * len(wanted)
        assert all(isinstance(call["x"], np.ndarray) and isinstance(call["y"], jax.Array) for call in calls)


@pytest.mark.check
def test_a_proof_multiplies_and_divides_by_a_scale_of_its_own():
    """Integers, as a count in place of a gradient, are no numbers to divide."""

    def grad_fn(params, batch, keys, *, scale=1, carried=0):
        return scale, {"carried": carried}, {"w": np.float32(6 * scale), "n": np.int32(3)}

    for given, seen in (({}, 0.5), ({"scale": 8, "carried": 4}, 4)):
        loss, aux, grads = _rescale(grad_fn)(None, None, None, **given)
        assert (loss, aux, grads["n"]) == (seen, {"carried": given.get("carried", 0)}, 3)
        assert (float(grads["w"]), grads["n"].dtype) == (12 * seen, np.int32)


def test_a_run_shows_leaves_in_their_original_shapes():
    """With the zeros that a state holds, parameters and carried state would be compared as other shapes."""
    padded = Padded(np.array([1.0, 2.0, 0.0]), ((0, 2),))
    row = DP4._replace(steps=2)
    program = Program(row, sk.abstract_mesh(data=4), row.plan, None, None, PARAMS, [np.zeros(1)] * 4, KEY)
    state = SimpleNamespace(params={"w": padded}, carried={"c": padded}, opt_state=(Recorded((), {"w": padded}),))
    metrics = {"loss": np.array([3.0, 4.0])}
    object.__setattr__(program, "step", lambda state, batch: (state, metrics))
    vars(program).update(start=state, shapes=None, compiled=None)
    ran = program.ran
    assert [float(taken.metrics["loss"]) for taken in ran.steps] == [3, 4, 3, 4]
    assert [taken.params is None for taken in ran.steps] == [True, False, True, False]
    assert [taken.compiled for taken in ran.steps] == [0] * 4 and ran.state is state and ran.metrics is metrics
    for taken in ran.steps[1::2]:
        for tree in (taken.params["w"], taken.carried["c"], taken.grads["w"]):
            assert tree.tolist() == [1, 2]


@pytest.mark.check
def test_the_devices_of_a_row_are_its_meshs():
    devices = [jax.devices()[i] for i in (5, 0, 7, 2)]
    program = Program.of(DP4._replace(devices=devices), OWN, optax.sgd(0.1), PARAMS, BATCHES, KEY)
    assert list(program.mesh.devices.flat) == devices


@pytest.mark.check
def test_the_plans_collectives_are_told_from_those_of_the_loss_by_their_scope():
    """A user's file of a name like ours was taken for the plan, whose bytes then were too many."""
    plan = sk.chain(sk.dp("x"), sk.fsdp("y", min_size=1, layerwise=("layers",)))

    def loss(params, batch, keys):
        return jnp.sum(sk.all_reduce(batch @ sk.gathered(jnp.tanh)(params["layers"]), "x"))

    init, step = sk.make_train_step(sk.value_and_grad(loss), optax.sgd(0.1), mesh=sk.abstract_mesh(x=2, y=2), plan=plan)
    traced = step.trace(init.abstract({"layers": np.ones((4, 4), np.float32)}), np.ones((8, 4), np.float32))
    sites = [site for site in walk(traced.jaxpr.jaxpr) if kind_of(site.equation)]
    own = [(kind_of(s.equation), mesh_axes(s.equation)) for s in sites if s.within(PLAN)]
    assert own == [("all_gather", ("y",))] * 2 + [("reduce_scatter", ("y",)), ("all_reduce", ("x",))]
    others = [(kind_of(s.equation), mesh_axes(s.equation)) for s in sites if not s.within(PLAN)]
    assert others == [("all_reduce", ("x",)), ("all_reduce", ("y",))]
