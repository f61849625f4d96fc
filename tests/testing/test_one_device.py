"""one_device: how far another run may be from it, in figures that are computed by hand."""

import jax
import numpy as np
import optax
import pytest

import shardkit as sk
from shardkit.testing.one_device import Training, _allow_differences, _perturb, _Step, estimate_noise, one_device

RELATIVE = 1e-3


def step(loss, weight, w, small, carried=0.0):
    """The results of a step, with gradients and parameters of two leaves."""
    tree = {"w": np.array(w), "small": np.array(small)}
    # A count is compared as a number: of an unsigned dtype or of booleans a difference would wrap or be refused.
    state = {"count": np.array(carried, np.uint8), "seen": np.array(carried > 6)}
    return _Step(np.float64(loss), {"weight": np.array(weight)}, tree, tree, state)


PLAIN = step(10.0, 100.0, [4.0, -2.0], [0.0, 0.0], 7.0)


def allowed(*noisy, noise=False):
    return _allow_differences(PLAIN, *noisy, relative=RELATIVE, is_noise={"w": False, "small": noise})


# proves N12: twice the larger distance of the two runs, whichever way they went, and what another order may change
@pytest.mark.check
@pytest.mark.parametrize("sides", [(-1, -1), (1, 1), (1, -1)])
def test_the_distance_to_both_runs_counts_whichever_way_they_went(sides):
    """Both runs may lie below: without the absolute value less than the rounding would be allowed, or less than 0."""
    a, b = sides
    runs = [
        step(10 + a * 0.5, 100 + a * 3, [4 + a * 0.25, -2.0], [a * 0.125] * 2, 7 + a * 2),
        step(10 + b * 0.25, 100 + b * 1, [4 + b * 0.125, -2 + b * 0.5], [b * 0.25, 0.0], 7 + b * 1),
    ]
    found = allowed(*runs)
    assert found.loss_allowed == pytest.approx(2 * 0.5 + RELATIVE * 10)
    assert found.metrics_allowed == {"weight": pytest.approx(2 * 3 + RELATIVE * 100)}
    assert found.grads_allowed == {
        "w": pytest.approx(2 * 0.5 + RELATIVE * 4),
        "small": pytest.approx(2 * 0.25 + 1e-6 * 4),
    }
    np.testing.assert_allclose(found.params_allowed["w"], [2 * 0.25 + RELATIVE * 4, 2 * 0.5 + RELATIVE * 4])
    np.testing.assert_allclose(found.params_allowed["small"], [2 * 0.25, 2 * 0.125])
    seen = 2 * (7 + min(a * 2, b) <= 6) + RELATIVE
    assert found.carried_allowed == {"count": pytest.approx(2 * 2 + RELATIVE * 7), "seen": pytest.approx(seen)}
    assert (found.loss, found.metrics, found.grads, found.params, found.carried) == PLAIN


@pytest.mark.check
def test_a_leaf_of_noise_may_move_by_the_norm_of_the_distance_in_each_element():
    runs = step(10.0, 100.0, [4.0, -2.0], [1.5, 2.0]), PLAIN
    np.testing.assert_allclose(allowed(*runs, noise=True).params_allowed["small"], [5.0, 5.0])
    np.testing.assert_allclose(allowed(*runs).params_allowed["small"], [3.0, 4.0])


@pytest.mark.check
def test_a_metric_far_below_the_loss_is_held_to_a_tenth_of_the_losss_error():
    plain = step(10.0, 1e-9, [1.0, 1.0], [0.0, 0.0])
    found = _allow_differences(plain, plain, plain, relative=RELATIVE, is_noise={"w": False, "small": False})
    assert found.metrics_allowed == {"weight": pytest.approx(0.1 * RELATIVE * 10)}


@pytest.mark.check
def test_the_error_of_a_gradient_is_a_share_of_its_leaf_and_of_the_largest_leaf():
    """A leaf whose true value is zero holds rounding of what was summed: its own size allows nothing."""
    grads = {"large": np.array([-200.0, 1.0]), "mid": np.array([0.5]), "zero": np.zeros(2), "none": np.zeros(0)}
    assert estimate_noise(grads, RELATIVE) == pytest.approx({"large": 0.2, "mid": 5e-4, "zero": 2e-4, "none": 2e-4})
    moved = {sign: _perturb(grads, RELATIVE, sign) for sign in (1, -1)}
    for name, error in estimate_noise(grads, RELATIVE).items():
        up, down = moved[1][name] - grads[name], moved[-1][name] - grads[name]
        np.testing.assert_allclose(np.abs(up), error)
        np.testing.assert_allclose(down, -up)
        assert up.dtype == grads[name].dtype


def test_a_leaf_is_noise_from_the_step_on_in_which_its_gradient_is_nothing_else():
    """Of all others each element has its own bound; what an optimizer remembers of noise stays."""

    def loss(params, x, keys):
        return sk.Mean.of((x @ params["w"] - 1) ** 2 + 0 * x[:, 0] * params["idle"][0] + x[:, 0] * params["late"].sum())

    rng, rate = np.random.default_rng(0), 0.125
    params = {"w": np.zeros(4, "f"), "idle": np.ones(4, "f"), "late": np.zeros(4, "f")}
    batches = [rng.normal(size=(8, 4)).astype("f") for _ in range(2)]
    batches[0][:, 0] = 0
    first, second = one_device(
        sk.value_and_grad(loss), optax.sgd(rate), params, batches, relative=RELATIVE, key=jax.random.key(3)
    ).steps
    error = estimate_noise(first.grads, RELATIVE)
    largest = np.max(np.abs(first.grads["w"]))
    assert error == pytest.approx({"w": RELATIVE * largest, "idle": 1e-6 * largest, "late": 1e-6 * largest})
    # both runs are off by rate * error in each element; a norm over four of them is twice as much
    own = first.params_allowed["w"] - RELATIVE * np.max(np.abs(first.params["w"]))
    np.testing.assert_allclose(own, 2 * rate * error["w"], rtol=1e-3)
    np.testing.assert_allclose(first.params_allowed["late"], 2 * 2 * rate * error["late"], rtol=1e-3)
    assert np.ptp(second.params_allowed["w"]) > 0 and np.ptp(second.params_allowed["late"]) == 0
    assert np.max(np.abs(second.grads["late"])) > 1e3 * estimate_noise(second.grads, RELATIVE)["idle"]


def test_carried_state_keeps_its_dtypes():
    carry = lambda carried, metrics, params: {"n": np.float32(carried["n"]) + metrics["loss"]}  # noqa: E731
    training = Training(lambda params, batch, keys: None, None, None, (), None, carry, {"n": np.float16(1)})
    first = training.init_carried(None)
    assert first["n"].dtype == np.float16
    after = training.update_carried(first, np.float32(2), {}, None)
    assert (after["n"].dtype, float(after["n"])) == (np.float16, 3)


# What alone finds a proof of a loss that sends, of which the reference is the same loss: jax's text, or ours of
# shard_map, would send the reader the wrong way. A name that Python does not know is told as Python tells it.
@pytest.mark.parametrize("send", (jax.lax.psum, sk.all_reduce))
def test_a_reference_that_sends_is_told_so(send):
    grad_fn = sk.value_and_grad(lambda w, x, keys: sk.Mean.of(w * send(x, "data")))
    message = (
        "one_device: the loss must run on one device, where no axis is bound; .* Pass a gradient function of a loss"
    )
    with pytest.raises(ValueError, match=message):
        one_device(grad_fn, optax.sgd(0.1), np.float32(1), [np.ones(4, "f")])


def test_a_reference_that_sends_under_vmap_is_told_so():
    def loss(w, x, keys):
        return sk.Mean.of(jax.vmap(lambda row: w * sk.all_reduce(row, "data"), axis_name="i")(x))

    with pytest.raises(ValueError, match="one_device: the loss must run on one device, where no axis is bound"):
        one_device(sk.value_and_grad(loss), optax.sgd(0.1), np.float32(1), [np.ones(4, "f")])


def test_a_variable_without_a_value_is_told_by_python():
    def loss(w, x, keys):
        if len(x) > 100:
            y = w
        return sk.Mean.of(y * x)

    with pytest.raises(UnboundLocalError, match="'y'"):
        one_device(sk.value_and_grad(loss), optax.sgd(0.1), np.float32(1), [np.ones(4, "f")])


def test_a_name_that_is_missing_is_told_by_python():
    grad_fn = sk.value_and_grad(lambda w, x, keys: w * of_no_module)  # noqa: F821
    with pytest.raises(NameError, match="of_no_module"):
        one_device(grad_fn, optax.sgd(0.1), np.float32(1), [np.ones(4, "f")])
