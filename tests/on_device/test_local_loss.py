"""Losses that are traced as on one device, and sums of Means: what both change, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from support.refusals import raises, type_error, value_error

PARAMS = {"w": np.linspace(-1, 1, 9, dtype=np.float32).reshape(3, 3), "b": np.zeros(2, np.float32)}
RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(8, 3)).astype("f"), "keep": (np.arange(8) % 3 == 0).astype("f")}
ROW = sk.testing.Row


@jax.custom_vjp
def clipped(x):
    """The identity, with a gradient that no derivative rule of its own would give."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, grad: (0.5 * grad,))


@jax.jit
def settled(w, x):
    """A loop as libraries have them: its carry begins with zeros that nobody can cast from outside."""
    scan = jax.checkpoint(lambda y, _: (jnp.tanh(y @ w) + x, None))
    return lax.scan(scan, jnp.zeros(x.shape, x.dtype), None, length=3)[0]


def attacked(w, x):
    """An example after a step against its gradient; the gradient of a constant is this example's alone."""
    push = jax.grad(lambda d: jnp.sum(jnp.tanh((x + d) @ w)))(jnp.zeros(x.shape, x.dtype))
    turns = lax.while_loop(lambda n: n < 2, lambda n: n + 1, jnp.int32(0))
    return x + 0.1 * push * turns.astype(x.dtype)


def loss_fn(params, batch, keys):
    def one(x):
        return jnp.sum(settled(clipped(params["w"]), attacked(params["w"], x)) ** 2) + jnp.sum(params["b"] ** 2)

    x = batch["x"] if keys is None else sk.dropout(batch["x"], keys, 0.5)
    return sk.Mean.of(jax.vmap(one)(x), batch["keep"]), {"kept": jnp.mean(x)}


LOCAL = sk.value_and_grad(loss_fn, local=True)


def traced(grad_fn, plan=None, mesh=None, params=PARAMS, batch=BATCH, **options):
    mesh = sk.make_mesh(jax.devices()[:2], data=2) if mesh is None else mesh
    plan = sk.dp("data") if plan is None else plan
    init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=plan, **options)
    return step.trace(init.abstract(params), batch)


ROWS = [
    ROW({"data": 1}, sk.dp("data")),
    ROW({"data": 2}, sk.dp("data"), accumulate=2, nonfinite="skip"),
    ROW({"data": 2}, sk.fsdp("data", min_size=1), deterministic=4),
    ROW({"data": 2, "z": 2}, sk.chain(sk.dp("data"), sk.zero2("z", min_size=1)), steps=2),
    ROW({"data": 2}, sk.zero1("data", min_size=1), precision="bf16", relative=3e-2),
]


@pytest.mark.quick("data=2: dp('data'), accumulate=2", "data=2, z=2: zero2('z') + dp('data'), steps=2")
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_loss_with_loops_that_nobody_can_cast_has_the_numbers_of_one_device(row):
    data = {"params": PARAMS, "batches": [BATCH, {**BATCH, "x": BATCH["x"][::-1]}]}
    sk.testing.prove(LOCAL, sk.value_and_grad(loss_fn), rows=[row], optimizer=optax.sgd(0.1, momentum=0.9), **data)


def test_the_first_step_checks_its_examples_as_on_one_device():
    """The check calls the loss without its gradient: on the mesh, `settled` is an error of jax for every right loss."""
    mesh = sk.make_mesh(jax.devices()[:2], data=2)

    def first_step(loss):
        grad_fn = sk.value_and_grad(loss, local=True)
        init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=sk.dp("data"))
        _, metrics = step(init(PARAMS, jax.random.key(0)), BATCH)
        return metrics["loss"]

    def without_keys(params, batch, keys):
        return loss_fn(params, batch, None)[0]

    def mixing(params, batch, keys):
        x = batch["x"] - jnp.mean(batch["x"], axis=0, keepdims=True)
        return loss_fn(params, {**batch, "x": x}, None)[0]

    alone = without_keys(PARAMS, BATCH, None)
    np.testing.assert_allclose(first_step(without_keys), alone.total / alone.weight, rtol=1e-6)
    with pytest.raises(ValueError, match="examples"):
        first_step(mixing)


def test_it_evaluates_and_sends_what_a_loss_without_loops_sends():
    """Frozen leaves are not sent, as without `local`; the loss is one equation, which the readers of programs enter."""
    frozen = sk.value_and_grad(loss_fn, trained={"w": True, "b": False}, local=True)
    step = traced(frozen)
    assert [row.bytes_in for row in sk.census(step).rows] == [16, 36]  # the loss and a mean; the gradient of w
    assert sk.lint(step) == []
    mesh = sk.make_mesh(jax.devices()[:2], data=2)
    evaluate = sk.make_eval_step(loss_fn, mesh=mesh, plan=sk.fsdp("data", min_size=1), local=True)
    one, _ = loss_fn(PARAMS, BATCH, None)
    np.testing.assert_allclose(evaluate(PARAMS, BATCH)["loss"], one.total / one.weight, rtol=1e-6)


def test_an_error_of_the_types_names_the_remedy():
    for call in (
        lambda: traced(sk.value_and_grad(loss_fn)),
        lambda: sk.make_eval_step(loss_fn, mesh=sk.make_mesh(jax.devices()[:2], data=2), plan=sk.dp("data"))(
            PARAMS, BATCH
        ),
    ):
        with pytest.raises(TypeError, match="carry input and carry output must have equal types") as found:
            call()
        line = settled.__wrapped__.__code__.co_firstlineno + 4
        assert (
            "value_and_grad: as on one device the loss can be traced. Pass value_and_grad(loss_fn, local=True), and "
            "local=True to make_eval_step; or cast what is the same on all devices at test_local_loss.py:"
            f"{line} (settled), as a loop's beginning is, sk.vary_like(start, x) of its data x."
        ) in found.value.__notes__


def context_loss(params, batch, keys, start):
    """A loop over tokens that two axes split, whose beginning is cast by `start`; its loss communicates."""
    x = jnp.tanh(batch["x"] * params["w"])
    total, _ = lax.scan(lambda sums, token: (sums + token, None), start(jnp.zeros(len(x)), x), x.T)
    whole = sk.all_reduce(total, "context")
    return sk.Mean(jnp.sum(whole**2), jnp.float32(len(x)))


def test_a_loop_of_a_loss_that_communicates_is_told_its_cast():
    """sk.vary(start, "context") was right where "context" was the only axis, and an error of jax on two."""
    plan, params = sk.chain(sk.dp("data"), sk.cp("context")), {"w": jnp.float32(0.5)}
    batch = {"x": np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)}

    def step(start):
        return sk.value_and_grad(lambda *args: context_loss(*args, start))

    two = sk.make_mesh(jax.devices()[:4], data=2, context=2)
    with pytest.raises(TypeError, match="carry input and carry output must have equal types") as found:
        traced(step(lambda zero, x: sk.vary(zero, "context")), plan, two, params, batch=batch)
    line = context_loss.__code__.co_firstlineno + 3
    assert (
        "value_and_grad: without the types of axes the loss can be traced. Cast what is the same on all devices at "
        f"test_local_loss.py:{line} (context_loss), as a loop's beginning is, sk.vary_like(start, x) of its data x."
    ) in found.value.__notes__
    by_like = step(lambda zero, x: sk.vary_like(zero, x))
    for mesh in (two, sk.make_mesh(jax.devices()[:4], data=1, context=4)):
        traced(by_like, plan, mesh, params, batch=batch)


# What alone finds jax's own assertion, without words, and a note of casts that do not help.
def test_a_collective_over_an_axis_of_vmap_is_named():
    def one(w, x):
        return jnp.sum((x * w - lax.pmean(x * w, "rows")) ** 2)

    def loss(params, batch, keys):
        return sk.Mean.of(jax.vmap(lambda x: one(params["w"], x), axis_name="rows")(batch["x"]))

    mesh = sk.make_mesh(jax.devices()[:2], data=2)
    batch = {"x": np.ones((4, 8), np.float32)}
    with pytest.raises(AssertionError) as found:
        traced(sk.value_and_grad(loss), sk.dp("data"), mesh, {"w": jnp.float32(0.5)}, batch=batch)
    line = one.__code__.co_firstlineno + 1
    assert (
        f"value_and_grad: test_local_loss.py:{line} (one): jax cannot trace a collective over an axis of jax.vmap "
        'inside of shard_map; got `return jnp.sum((x * w - lax.pmean(x * w, "rows")) ** 2)`. Take the sum or mean over '
        "the dim that is mapped, outside of the vmap; over the examples of all devices it is sk.all_reduce."
    ) in found.value.__notes__


def test_an_error_that_one_device_has_too_is_left_alone():
    def wrong(params, batch, keys):
        raise KeyError("mine")

    with raises(KeyError, "'mine'"):
        traced(sk.value_and_grad(wrong))


TRACED = "value_and_grad: with local=True a loss is traced as on one device, and must not communicate; it calls "
WHOLE = "value_and_grad: with local=True a loss does not communicate, and must get whole leaves and examples; the plan "
USE = "Leave out local=, or use dp, zero1, zero2 or fsdp."
W = {"w": np.ones((4, 4), np.float32)}


def calls(fn):
    return sk.value_and_grad(lambda params, batch, keys: jnp.sum(params["w"]) * jnp.mean(fn(batch["x"])), local=True)


def splits(plan, params, **sizes):
    """What a plan does with these parameters, and a batch whose dims both divide."""
    mesh = sk.make_mesh(jax.devices()[:4], **sizes)
    return lambda: traced(calls(jnp.sin), plan, mesh, params, batch={"x": np.ones((4, 4), np.float32)})


def two_means(params, batch, keys):
    x = batch["x"] @ params["w"]
    return sk.Mean.of(x**2) - sum([-sk.Mean.of(x[:, 0], batch["keep"]), sk.Mean.of(x[:, 1], 1 - batch["keep"])]) / 10


@pytest.mark.parametrize(
    ("message", "refused"),
    {
        f"{TRACED}all_reduce over 'data'. Leave out local=.": lambda: traced(calls(lambda x: sk.all_reduce(x, "data"))),
        f"{TRACED}axis_index over 'data'. Leave out local=.": lambda: traced(calls(lambda x: lax.axis_index("data"))),
        f"{WHOLE}passes it a part of leaf w. {USE}": splits(
            sk.chain(sk.dp("data"), sk.tp("model", {"w": P("model")})), W, data=2, model=2
        ),
        f"{WHOLE}passes it a part of leaf experts.w. {USE}": splits(sk.ep("data"), {"experts": W}, data=4),
        f"{WHOLE}passes it a part of each example, split over 'context'. {USE}": splits(
            sk.chain(sk.dp("data"), sk.cp("context")), W, data=2, context=2
        ),
        "value_and_grad: with local=True a loss does not communicate, and must get weights that are "
        "gathered; got Handle((4, 1) over 'data'), a lazy leaf. Leave out layerwise= of the plan, or "
        "local=.": splits(sk.fsdp("data", layerwise=("layers",), min_size=1), {"layers": W}, data=4),
        "value_and_grad: with local=True a loss does not communicate, and a sum of means sums its weights over "
        "devices; got both. Leave out local=, or weight the values of one Mean.": lambda: traced(
            sk.value_and_grad(two_means, local=True)
        ),
        "make_train_step: a sum of means divides by the weights of the whole batch before the gradient, so it must be "
        "computed at once; got accumulate=2. Leave that out, or weight the values of one Mean.": lambda: traced(
            sk.value_and_grad(two_means), accumulate=2
        ),
        "make_train_step: a sum of means divides by the weights of the whole batch before the gradient, so it must be "
        "computed at once; got deterministic. Leave that out, or weight the values of one Mean.": lambda: traced(
            sk.value_and_grad(two_means), mesh=sk.make_mesh(jax.devices()[:1], data=1), deterministic=2
        ),
    }.items(),
)
def test_what_is_refused(message, refused):
    with value_error(message):
        refused()


ONE = sk.Mean(jnp.float32(1), 1)
NO_FACTOR = "Mean: the factor of a mean must be a real number or an array of them; got {}. Multiply the values before "
NO_FACTOR += "they are summed."
NOT_LINEAR = "Mean: means can be added, and multiplied by numbers, because they are divided only after the sum over "
NOT_LINEAR += "devices; got one that is {}. Do that to the values before they are summed, or use the metric of the "
NOT_LINEAR += "step."
COMPLEX = "Mean.of: {} must be real numbers; got complex64[2]. Pass a real part, as "
COMPLEX += "jnp.real(x) or jnp.abs(x)."


@pytest.mark.parametrize(
    "message, wrong",
    [
        ("Mean: only Means can be added to it; got float. Pass Mean(value, 1).", lambda: ONE + 1.0),
        ("Mean: only Means can be added to it; got NoneType. Pass Mean(value, 1).", lambda: ONE - None),
        ("Mean: only Means can be added to it; got int. Pass Mean(value, 1).", lambda: 1 - ONE),
        (NO_FACTOR.format("Mean(float32[], int)"), lambda: ONE * ONE),
        (NO_FACTOR.format("Mean(float32[], int)"), lambda: ONE / ONE),
        (NO_FACTOR.format("Sum"), lambda: (ONE + ONE) * (ONE + ONE)),
        (NO_FACTOR.format("str"), lambda: "2" * ONE),
        (NO_FACTOR.format("complex"), lambda: 1j * ONE),
        (NOT_LINEAR.format("divided by"), lambda: 1 / ONE),
        (NOT_LINEAR.format("divided by"), lambda: np.float32(1) / (ONE + ONE)),
        (NOT_LINEAR.format("raised to a power"), lambda: ONE**2),
        (COMPLEX.format("values"), lambda: sk.Mean.of(jnp.ones(2, complex))),
        (COMPLEX.format("weights"), lambda: sk.Mean.of(jnp.ones(2), jnp.ones(2, complex))),
    ],
)
def test_what_no_mean_can_be_is_refused(message, wrong):
    with type_error(message):
        wrong()


def test_a_factor_is_of_numpy_or_of_jax_and_of_all_arrays_of_a_mean():
    for two in (2, 2.0, np.float32(2), jnp.float32(2)):
        assert (two * ONE).total == (ONE * two).total == 2 and (ONE / two).total == 0.5
        assert [mean.total for mean in (two * (ONE - ONE) / 4).terms] == [0.5, -0.5]
    assert (2 * sk.Mean([jnp.float32(1), jnp.float32(3)], 1)).total == [2, 6]


WEIGHT = (
    "Mean: the weight must be above 0 and finite, because the total is divided by the sum of weights; got {}. Pass "
)
WEIGHT += "the number of values, or the sum of their weights."


@pytest.mark.parametrize(
    "weight, told",
    [(0.0, "0"), (-1, "-1"), (np.float32(0), "0"), (float("inf"), "inf"), (np.array([0.0, -1.0]), "[ 0. -1.]")],
)
def test_a_weight_that_divides_nothing_is_refused_where_it_is_known(weight, told):
    """With 0.0 the loss was the total itself, with -1.0 the gradient went the other way; neither was said."""
    aux = np.ndim(weight) > 0
    with value_error(WEIGHT.format(told)):
        traced(
            sk.value_and_grad(
                lambda p, b, k: (
                    (jnp.sum(p["w"]), {"x": sk.Mean(jnp.ones(2), weight)}) if aux else sk.Mean(jnp.sum(p["w"]), weight)
                ),
                local=aux,
            )
        )
    # On one device without jit a batch is known too: one of padding alone is no mistake of the program.
    if isinstance(weight, np.float32):
        loss, _, _ = sk.value_and_grad(lambda p, b, k: sk.Mean(jnp.sum(p), weight))(jnp.ones(2), None, None)
        assert loss.weight == 0


def test_a_count_may_be_beyond_int32():
    assert sk.value_and_grad(lambda p, b, k: sk.Mean(p, 2**31))(jnp.float32(1), None, None)[0].weight == 2.0**31
    assert (2**40 * ONE).total == 2.0**40
    with value_error("Mean: a whole number must be below 2**63; got 64 bits. Pass a float."):
        2**63 * ONE
    with value_error("Mean: a whole number must be below 2**63; got 64 bits. Pass a float."):
        sk.value_and_grad(lambda p, b, k: sk.Mean(p, 2**63))(jnp.float32(1), None, None)


def test_several_means_are_no_auxiliary_one():
    with type_error(
        "value_and_grad: aux 'both' must be a scalar or Mean(total, weight); got Sum. Sum over the examples and return "
        "Mean(total, weight), or their mean."
    ):
        traced(sk.value_and_grad(lambda p, b, k: (jnp.sum(p["w"]), {"both": two_means(p, b, k)})))


def test_a_sum_of_means_is_that_of_the_whole_batch():
    """Each device has another share of each weight, and one a share of 0; the gradient is one device's."""
    rows = [
        ROW({"data": 4}, sk.dp("data")),
        ROW({"data": 2}, sk.fsdp("data", min_size=1), precision="bf16", relative=3e-2),
    ]

    def plain(params, batch, keys):
        x, keep = batch["x"] @ params["w"], batch["keep"]
        means = jnp.sum(x[:, 0] * keep) / jnp.sum(keep) - jnp.sum(x[:, 1] * (1 - keep)) / jnp.sum(1 - keep)
        return sk.Mean(((jnp.mean(x**2) + 0.1 * means) * 24).astype(jnp.float32), jnp.float32(24))

    grad_fn = sk.value_and_grad(two_means)
    job = {"params": {"w": PARAMS["w"]}, "batches": [{**BATCH, "keep": (np.arange(8) < 3).astype("f")}]}
    sk.testing.prove(grad_fn, sk.value_and_grad(plain), rows=rows, optimizer=optax.sgd(0.1), **job)
    sk.testing.prove(grad_fn, grad_fn, rows=rows[:1], optimizer=optax.sgd(0.1), **job)


def two_weights(params, batch, keys, axis=()):
    x, keep = batch["x"] @ params["w"], batch["keep"]
    half = len(x) // 2
    rows = sk.axis_index("model") * half + jnp.arange(half) if axis else slice(None)
    return sk.Mean.of(sk.vary(x, axis)[rows, 0], sk.vary(keep, axis)[rows]) + 0.5 * sk.Mean.of(x[:, 1:] ** 2)


def test_a_mean_of_a_sum_may_be_whole_along_an_axis_or_without_weight():
    """Each device of the model axis has examples of its own for one mean, and all of them for the other."""
    row = ROW({"data": 2, "model": 2}, sk.chain(sk.dp("data"), sk.tp("model", lambda path, leaf: None)))
    job = {"params": {"w": PARAMS["w"]}, "batches": [{**BATCH, "keep": np.ones(8, "f")}]}
    grad_fn = sk.value_and_grad(lambda *args: two_weights(*args, axis=("model",)))
    sk.testing.prove(grad_fn, sk.value_and_grad(two_weights), rows=[row], optimizer=optax.sgd(0.1), **job)

    # The weights of the other sum to less than the 1 by which nothing is divided.
    def loss_fn(w, batch, keys):
        return sk.Mean.of(batch * w, jnp.full(4, 0.125)) + sk.Mean.of(batch * w, jnp.zeros(4))

    _, _, grad = sk.value_and_grad(loss_fn)(jnp.float32(1), jnp.arange(4.0), None)
    assert grad / 0.5 == 1.5  # the largest weight; the mean of 0, 1, 2, 3
