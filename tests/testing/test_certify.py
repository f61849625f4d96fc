"""certify_gradients: the classical recipes, and which axis each of them counts wrongly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.testing import certify_gradients
from shardkit.testing.certify import _describe_mistake, _explain_factor
from support.refusals import raises, value_error

RNG = np.random.default_rng(0)
PARAMS = {"w_up": RNG.normal(size=(4, 8)).astype(np.float32), "w_down": RNG.normal(size=(8, 2)).astype(np.float32)}
BATCH = RNG.normal(size=(8, 4)).astype(np.float32)


def loss(params, x):
    return jnp.mean(jnp.tanh(x @ params["w_up"]) @ params["w_down"]) ** 2 + jnp.mean((x @ params["w_up"]) ** 2)


def square(params, x):
    return jnp.mean((x @ params["w_up"]) ** 2) + jnp.mean((x[:, :2] @ params["w_down"][:2]) ** 2)


def mean(tree):
    return sk.all_reduce(tree, "data", op="mean")


def own(params, x):
    return jax.grad(square)(sk.vary(params, "data"), x)


RIGHT = {
    "cast, then pmean(grad(local))": lambda p, x: mean(own(p, x)),
    "grad(pmean of local)": lambda p, x: jax.grad(lambda p: mean(square(p, x)))(p),
    "pmean(grad(pmean of local))": lambda p, x: mean(jax.grad(lambda p: mean(square(p, x)))(p)),
}
SUMMED = "are 4x the reference: axis 'data' (size 4) is summed twice, or a division by its size is missing"
WRONG = {
    "grad(local)": (lambda p, x: jax.grad(square)(p, x), SUMMED),
    "pmean(grad(local))": (lambda p, x: mean(jax.grad(square)(p, x)), SUMMED),
    "divided twice": (
        lambda p, x: jax.tree.map(lambda g: g / sk.axis_size("data"), mean(own(p, x))),
        "are 1/4 of the reference: axis 'data' (size 4) is divided by once too often, or a sum over it is missing",
    ),
    "not reduced": (
        own,
        "differ between devices: axis 'data' (size 4) is not reduced; the mean over it is the reference",
    ),
    "halves not reduced": (
        lambda p, x: jax.tree.map(lambda g: g / sk.axis_size("data"), own(p, x)),
        "differ between devices: axis 'data' (size 4) is not reduced; the sum over it is the reference",
    ),
    "another sign": (
        lambda p, x: jax.tree.map(jnp.negative, mean(own(p, x))),
        "are -1x the reference: already on one device, so no axis is to blame",
    ),
    "accumulation divided twice": (
        lambda p, x: jax.tree.map(lambda *g: mean(sum(g)) / 4, *(own(p, part) for part in jnp.split(x, 2))),
        "are 1/2 of the reference: already on one device, so no axis is to blame",
    ),
}
SPECS = {"w_up": P(None, "model"), "w_down": P("model")}


def wrong(mesh, words):
    """The whole sentence about gradients that are wrong on a mesh."""
    return raises(
        AssertionError,
        f"certify_gradients: the gradients must equal the reference on every mesh; on mesh {mesh}, gradients of "
        f"{words}. Cast parameters with sk.vary over the batch axes, differentiate, and reduce the gradients once.",
    )


@pytest.mark.parametrize("name", RIGHT)
def test_right_recipes_are_certified(name):  # facts 2
    certificate = certify_gradients(RIGHT[name], square, PARAMS, BATCH, devices=4)
    assert str(certificate) == ("the gradients of 2 leaves are those of one device on 3 meshes: data=1; data=2; data=4")


@pytest.mark.parametrize("name", WRONG)
def test_wrong_recipes_are_named(name):  # facts 2
    grad_fn, words = WRONG[name]
    mesh = "data=1" if "one device" in words else "data=4"
    with wrong(mesh, f"`w_down`, `w_up` {words}"):
        certify_gradients(grad_fn, square, PARAMS, BATCH, devices=4)


@pytest.mark.parametrize("devices", (2, 4, 8))
def test_a_sum_where_a_mean_was_meant_grows_with_the_mesh(devices):  # proves S122
    """On one device a sum is a mean and nothing can be seen; every larger mesh shows its own size as the factor."""
    summed = lambda p, x: sk.all_reduce(own(p, x), "data", op="sum")  # noqa: E731
    twice = f"axis 'data' (size {devices}) is summed twice, or a division by its size is missing"
    with wrong(f"data={devices}", f"`w_down`, `w_up` are {devices}x the reference: {twice}"):
        certify_gradients(summed, square, PARAMS, BATCH, devices=devices)


def tensor_parallel(params, x, *, down=1):
    """Row and column parallel: w_up is split by columns, w_down by rows, the product summed over "model"."""
    params = sk.vary(params, "data")

    def local(params):
        y = sk.all_reduce(jnp.tanh(x @ params["w_up"]) @ params["w_down"], "model")
        return jnp.mean(y**2)

    grads = mean(jax.grad(local)(params))
    return {**grads, "w_down": grads["w_down"] * down}


def whole(params, x):
    return jnp.mean((jnp.tanh(x @ params["w_up"]) @ params["w_down"]) ** 2)


def test_two_axes_and_sharded_parameters_one_leaf_and_what_is_not_one_factor():
    options = {"axes": ("data", "model"), "param_specs": SPECS}
    assert len(certify_gradients(tensor_parallel, whole, PARAMS, BATCH, **options).meshes) == 10
    twice = "axis 'model' (size 8) is summed twice, or a division by its size is missing"
    with wrong("data=1, model=8", f"`w_down` are 8x the reference: {twice}"):
        certify_gradients(
            lambda p, x: tensor_parallel(p, x, down=sk.axis_size("model")), whole, PARAMS, BATCH, **options
        )
    with wrong("data=4", f"`w_down` {WRONG['not reduced'][1]}"):
        certify_gradients(lambda p, x: own(p, x) | {"w_up": mean(own(p, x)["w_up"])}, square, PARAMS, BATCH, devices=4)
    with pytest.raises(AssertionError, match="differ from the reference, by no common factor"):
        certify_gradients(lambda p, x: sk.broadcast(own(p, x), "data"), square, PARAMS, BATCH, devices=4)
    x = np.concatenate([BATCH, (np.arange(8) < 3)[:, None].astype(np.float32)], 1)  # the last column is a weight

    def weighted(params, x):
        return jnp.sum((x[:, :4] @ params["w_up"]) ** 2 * x[:, 4:]) / jnp.maximum(jnp.sum(x[:, 4:]), 1)

    params = {"w_up": PARAMS["w_up"]}
    averaged = lambda p, x: mean(jax.grad(weighted)(sk.vary(p, "data"), x))  # noqa: E731
    with pytest.raises(AssertionError, match="as when means of unequal weight are averaged"):
        certify_gradients(averaged, weighted, params, x, devices=4)


def test_errors_in_full():
    with value_error(
        "certify_gradients: the batch and the parameters must be divisible by axis 'data'; they fit no mesh of 2 to 8 "
        "devices. Pass larger arrays or other specs."
    ):
        certify_gradients(own, square, PARAMS, BATCH[:7])
    with raises(
        AssertionError,
        "certify_gradients: the gradients must be a pytree like the parameters; got PyTreeDef(*). Return one gradient "
        "for each parameter.",
    ):
        certify_gradients(lambda p, x: p["w_up"], square, PARAMS, BATCH)


def refused(kind, **changed):
    options = {"grad_fn": RIGHT["cast, then pmean(grad(local))"], "loss_fn": square, "params": PARAMS, "batch": BATCH}
    with pytest.raises(kind) as error:
        certify_gradients(**{**options, **changed})
    return str(error.value)


def test_arguments_that_cannot_be_meant():
    assert refused(TypeError, params={**PARAMS, "n": np.int32(3)}) == (
        "certify_gradients: the parameters must be floating-point numbers; leaf n is int32. Move it to the batch, or "
        "close over it."
    )
    for devices in (1, 64):
        assert refused(ValueError, devices=devices) == (
            f"certify_gradients: devices must be between 2 and the number of devices, 8; got {devices}. "
            f"Pass another number, or call simulate_devices({max(devices, 2)}) before jax starts."
        )
    assert refused(ValueError, batch_spec=P("rows")) == (
        "certify_gradients: the spec P('rows',) uses axis 'rows', which is not among 'data'. Use one of those."
    )


def test_scalars_of_the_batch_are_whole_and_what_is_not_finite_is_called_so():
    scaled = lambda p, b: square(p, b["x"]) * b["scale"]  # noqa: E731
    grads = lambda p, b: mean(jax.grad(scaled)(sk.vary(p, "data"), b))  # noqa: E731
    batch = {"x": BATCH, "scale": np.float32(2)}
    for spec in (None, {"x": P("data"), "scale": None}):
        assert certify_gradients(grads, scaled, PARAMS, batch, axes="data", batch_spec=spec, devices=2).leaves == 2
    # Neither has to do with means of unequal weight.
    right = RIGHT["cast, then pmean(grad(local))"]
    nan = lambda p, x: jax.tree.map(lambda g: g / 0, right(p, x))  # noqa: E731
    shifted = lambda p, x: jax.tree.map(lambda g: g + 1, right(p, x))  # noqa: E731
    for wrong, words in ((nan, "are not finite where the reference is. Cast"), (shifted, r"reference -?\d\.\d+;")):
        with pytest.raises(AssertionError, match=rf"on mesh data=1, gradients of `w_down`.* {words}"):
            certify_gradients(wrong, square, PARAMS, BATCH, devices=2)


def test_a_reference_that_cannot_tell_is_refused():
    loss = lambda p, b: jnp.mean((b @ p) ** 2)  # noqa: E731
    wrong = lambda p, b: 7 * sk.all_reduce(jax.grad(loss)(sk.vary(p, "data"), b), "data")  # noqa: E731
    rule = "certify_gradients: the reference must be finite and have a nonzero gradient, or nothing is proved; "
    remedy = ". Pass other parameters or another batch."
    for batch, what in (
        (np.zeros((8, 3), "f"), "all gradients are zero"),
        (np.full((8, 3), np.nan, "f"), "'(the whole tree)' is not finite"),
    ):
        with value_error(f"{rule}{what}{remedy}"):
            certify_gradients(wrong, loss, jnp.ones(3), batch)


def test_a_function_for_check_vma_off_is_certified_as_such():
    """It was called 8 times wrong: shard_map's types sum the gradient of a replicated value."""
    loss = lambda w, x: jnp.mean((x @ w) ** 2)  # noqa: E731
    mean = lambda w, x: lax.pmean(jax.grad(loss)(w, x), "data")  # noqa: E731
    alone = lambda w, x: jax.grad(lambda w: lax.pmean(loss(w, x), "data"))(w)  # noqa: E731
    arguments = loss, np.ones(4, "f"), np.random.default_rng(0).normal(size=(16, 4)).astype("f")
    assert len(certify_gradients(mean, *arguments, check_vma=False).meshes) == 4
    for wrong, check_vma in ((mean, True), (alone, False)):
        with pytest.raises(AssertionError):
            certify_gradients(wrong, *arguments, check_vma=check_vma)


@pytest.mark.check
def test_words_for_what_is_not_one_factor():
    """By the element that differs most, not by the largest; a mean of unequal weights only where there is an axis."""
    y = np.array([[100.0, 1.0, 2.0]])
    x = y + np.array([[0.5, 3.0, 0.0]])
    text = "differ from the reference, by no common factor: the largest difference is 3, where it is 4 and the "
    assert _describe_mistake(x, y, {"data": 1}, 1e-5) == f"{text}reference 1"
    both = _describe_mistake(np.concatenate([x, x]), np.concatenate([y, y]), {"data": 2}, 1e-5)
    assert both == f"{text}reference 1, as when means of unequal weight are averaged"
    nan = np.array([[1.0, np.nan]])
    assert _describe_mistake(nan, np.ones((1, 2)), {"data": 1}, 1e-5) == "are not finite where the reference is"
    apart, axis = np.array([[1.0, 2.0], [3.0, 5.0]]), "axis 'data' (size 2)"
    for wanted, words in (
        (apart.sum(0), f"differ between devices: {axis} is not reduced; the sum over it is the reference"),
        (apart.mean(0), f"differ between devices: {axis} is not reduced; the mean over it is the reference"),
        (
            apart[0] + 9,
            f"differ between devices along {axis}, and neither their sum nor their mean is the reference",
        ),
        # pieces that differ in the reference too are no sign of a missing sum
        (apart / 2, f"are 2x the reference: {axis} is summed twice, or a division by its size is missing"),
    ):
        assert _describe_mistake(apart, np.broadcast_to(wanted, (2, 2)), {"data": 2}, 1e-5) == words


@pytest.mark.check
def test_the_axes_that_explain_a_factor():
    """To the fewest powers: 4 over axes of 2 and 4 is the second one."""

    def once(name, size):
        return f"axis {name!r} (size {size}) is summed twice, or a division by its size is missing"

    for factor, sizes, words in (
        (4, {"a": 2, "b": 4}, once('b', 4)),
        (4, {"a": 2}, "axis 'a' (size 2) is summed 2 times too often"),
        (1 / 9, {"a": 3, "b": 1}, "axis 'a' (size 3) is divided by 2 times too often"),
        (
            3 / 2, {"a": 2, "b": 3},
            f"axis 'a' (size 2) is divided by once too often, or a sum over it is missing and {once('b', 3)}",
        ),
        (1.02 * 3, {"b": 3}, once('b', 3)),
        (1.05 * 3, {"b": 3}, "no axis explains this factor"),
        (8, {"a": 2}, "no axis explains this factor"),
        (2, {"a": 1}, "already on one device, so no axis is to blame"),
    ):  # fmt: skip
        assert _explain_factor(factor, sizes) == words
