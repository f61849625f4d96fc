"""Loss functions, Means, and the gradient recipes of shard_map: ours is right, the classical ones are not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk

# Four devices hold one coefficient each; the loss is their mean times w, so the true gradient is 280 / 4 = 70.
COEFFICIENTS = np.array([2.0, 58.0, 90.0, 130.0], np.float32)
W = np.float32(1.0)


@pytest.fixture(scope="module")
def mesh4():
    return sk.make_mesh(jax.devices()[:4], data=4)


def local(w, c):
    return jnp.sum(w * c)


def global_mean(w, c):
    return lax.pmean(local(w, c), "data")


def averaged(x):
    return lax.pmean(sk.vary(x, "data"), "data")


RECIPES = {
    "grad(local)": lambda w, c: jax.grad(local)(w, c),
    "pmean(grad(local))": lambda w, c: averaged(jax.grad(local)(w, c)),
    "grad(pmean of local)": lambda w, c: jax.grad(global_mean)(w, c),
    "pmean(grad(pmean of local))": lambda w, c: averaged(jax.grad(global_mean)(w, c)),
    "vary first, then pmean(grad(local))": lambda w, c: averaged(jax.grad(local)(sk.vary(w, "data"), c)),
}


def run(recipe, mesh, **options):
    # Without vma tracking jax cannot tell that the result is equal everywhere, so each device's own is returned.
    kernel = lambda w, c: RECIPES[recipe](w, c).reshape(1)  # noqa: E731
    if options.get("check_vma", True):
        kernel = lambda w, c: sk.vary(RECIPES[recipe](w, c).reshape(1), "data")  # noqa: E731
    return np.asarray(
        jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"), **options))(
            W, COEFFICIENTS
        )
    )


# proves S59, T6: facts measured on jax 0.10 and 0.12
@pytest.mark.parametrize(
    ("recipe", "result"),
    [
        ("grad(local)", 280.0),
        ("pmean(grad(local))", 280.0),  # what most tutorials print: four times too large, and no error
        ("grad(pmean of local)", 70.0),
        ("pmean(grad(pmean of local))", 70.0),
        ("vary first, then pmean(grad(local))", 70.0),
    ],
)
def test_recipes_under_vma_tracking(recipe, result, mesh4):
    np.testing.assert_array_equal(run(recipe, mesh4), np.full(4, result))


# proves T6: the tutorials' recipe is right only without vma tracking, where another one goes wrong silently
def test_recipes_without_vma_tracking(mesh4):
    def plain(w, c):
        return jax.grad(lambda w: lax.pmean(jnp.sum(w * c), "data"))(w).reshape(1)

    shard = {"mesh": mesh4, "in_specs": (P(), P("data")), "out_specs": P("data"), "check_vma": False}
    inside = jax.jit(jax.shard_map(plain, **shard))(W, COEFFICIENTS)
    assert inside[0] == 2.0  # device 0's part, not 70

    def tutorial(w, c):
        return lax.pmean(jax.grad(local)(w, c), "data").reshape(1)

    np.testing.assert_array_equal(jax.jit(jax.shard_map(tutorial, **shard))(W, COEFFICIENTS), np.full(4, 70.0))


# proves S59
def test_the_builders_gradient_is_the_true_one(mesh4):
    def loss_fn(w, c, keys):
        return local(w, c)

    init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(1.0), mesh=mesh4, plan=sk.dp("data"))
    state, metrics = step(init(W, jax.random.key(0)), COEFFICIENTS)
    assert float(state.params) == 1.0 - 70.0
    assert float(metrics["loss"]) == 70.0


# proves T6, S86: a mean of means is wrong for unequal weights, and Mean is not
def test_unequal_weights_are_not_averaged_twice(mesh4):
    values = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
    weights = np.array([1.0, 1.0, 1.0, 5.0], np.float32)

    def loss_fn(w, batch, keys):
        return sk.Mean.of(w * batch["value"], batch["weight"])

    init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(1.0), mesh=mesh4, plan=sk.dp("data"))
    state, metrics = step(init(W, jax.random.key(0)), {"value": values, "weight": weights})
    assert float(metrics["loss"]) == np.average(values, weights=weights) == 3.25
    assert float(metrics["weight"]) == 8.0
    assert float(state.params) == 1.0 - 3.25


def test_value_and_grad_returns_partial_sums(mesh4):
    grad_fn = sk.value_and_grad(lambda w, c, keys: (sk.Mean(jnp.sum(w * c), jnp.float32(2)), {"one": c[0]}))

    def kernel(w, c):
        mean, aux, grads = grad_fn(sk.vary(w, "data"), c, None, scale=8)
        return jax.tree.map(lambda x: sk.vary(x.reshape(1), "data"), (mean.total, mean.weight, aux["one"].total, grads))

    total, weight, one, grads = jax.jit(
        jax.shard_map(kernel, mesh=mesh4, in_specs=(P(), P("data")), out_specs=P("data"))
    )(W, COEFFICIENTS)
    np.testing.assert_array_equal(total, COEFFICIENTS)
    np.testing.assert_array_equal(weight, np.full(4, 2.0))
    np.testing.assert_array_equal(one, COEFFICIENTS)
    np.testing.assert_array_equal(grads, 8 * COEFFICIENTS)  # the gradients of scale * total, the total unscaled


def bfloat16_weight(w, c, keys):
    return sk.Mean(jnp.sum(w * c), jnp.sum(jnp.ones_like(c)).astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (
            lambda w, c, keys: w * c,
            "value_and_grad: loss_fn must return a scalar, Mean(total, weight) or (either, aux); got float32[1]. "
            "Sum over the examples and return Mean(total, weight), or their mean.",
        ),
        (
            lambda w, c, keys: {"loss": jnp.sum(w * c)},
            "value_and_grad: loss_fn must return a scalar, Mean(total, weight) or (either, aux); got dict. "
            "Sum over the examples and return Mean(total, weight), or their mean.",
        ),
        (
            lambda w, c, keys: sk.Mean(w * c, jnp.float32(1)),
            "value_and_grad: loss_fn must return a scalar, Mean(total, weight) or (either, aux); got "
            "Mean(float32[1], float32[]). Sum over the examples and return Mean(total, weight), or their mean.",
        ),
        (
            lambda w, c, keys: (jnp.sum(w * c), [1.0]),
            "value_and_grad: aux must be a dict of scalars or Means by name; got list. "
            "Return for example (loss, {'accuracy': Mean(correct, count)}).",
        ),
        (
            lambda w, c, keys: (jnp.sum(w * c), {"each": w * c}),
            "value_and_grad: aux 'each' must be a scalar or Mean(total, weight); got float32[1]. "
            "Sum over the examples and return Mean(total, weight), or their mean.",
        ),
        (
            bfloat16_weight,
            "Mean: the weight must be float32 or an integer, because bfloat16 cannot count; got bfloat16. "
            "Sum it in float32, as Mean.of(values, weights) does.",
        ),
    ],
)
def test_a_loss_that_is_no_mean_is_refused(loss_fn, message, mesh4):
    init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(1.0), mesh=mesh4, plan=sk.dp("data"))
    with pytest.raises(TypeError) as error:
        step(init(W, jax.random.key(0)), COEFFICIENTS)
    assert str(error.value) == message


def test_total_and_weight_must_vary_alike(mesh4):
    def loss_fn(w, c, keys):
        return sk.Mean(sk.all_reduce(jnp.sum(w * c), "data"), jnp.sum(c))

    init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(1.0), mesh=mesh4, plan=sk.dp("data"))
    with pytest.raises(ValueError) as error:
        step(init(W, jax.random.key(0)), COEFFICIENTS)
    assert str(error.value) == (
        "Mean 'loss': total and weight must vary over the same axes; the total varies over none and the weight over "
        "'data', which differ in 'data'. Compute both from the same shards, or reduce both alike."
    )


def test_a_loss_reduced_by_its_author_is_taken_as_it_is(mesh4):
    grad_fn = sk.value_and_grad(lambda w, c, keys: sk.all_reduce(jnp.sum(w * c), "data", op="mean"))
    init, step = sk.make_train_step(grad_fn, optax.sgd(1.0), mesh=mesh4, plan=sk.dp("data"))
    state, metrics = step(init(W, jax.random.key(0)), COEFFICIENTS)
    assert (float(state.params), float(metrics["loss"])) == (1.0 - 70.0, 70.0)


def test_mean_of_sums_in_float32():
    ones = jnp.ones(4173, jnp.bfloat16)
    mean = sk.Mean.of(ones, ones)
    assert float(mean.weight) == 4173  # bfloat16 itself says 4160
    assert float(jnp.sum(ones)) == 4160
    assert (mean.total.dtype, mean.weight.dtype) == (jnp.float32, jnp.float32)
