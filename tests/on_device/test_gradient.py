"""Loss functions, Means, and the gradient recipes of shard_map: this one is right, the classical ones are not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from support.refusals import type_error, value_error

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
    given = {"mesh": mesh, "in_specs": (P(), P("data")), "out_specs": P("data")}
    return np.asarray(jax.jit(jax.shard_map(kernel, **given, **options))(W, COEFFICIENTS))


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

    job = {"mesh": mesh4, "plan": sk.dp("data"), "examples": "mixed"}  # a sum, of which the mean over devices is meant
    init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(1.0), **job)
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


def bfloat16_total(w, c, keys):
    return sk.Mean(jnp.sum(w * c).astype(jnp.bfloat16), 4)


@pytest.mark.parametrize(
    "message, loss_fn",
    {
        "value_and_grad: loss_fn must return a scalar, Mean(total, weight) or (either, aux); got float32[1]. "
        "Sum over the examples and return Mean(total, weight), or their mean.": lambda w, c, keys: w * c,
        "value_and_grad: loss_fn must return a scalar, Mean(total, weight) or (either, aux); got dict. Sum over the "
        "examples and return Mean(total, weight), or their mean.": lambda w, c, keys: {"loss": jnp.sum(w * c)},
        "value_and_grad: loss_fn must return a scalar, Mean(total, weight) or (either, aux); got "
        "Mean(float32[1], float32[]). Sum over the examples and return Mean(total, weight), "
        "or their mean.": lambda w, c, keys: sk.Mean(w * c, jnp.float32(1)),
        "value_and_grad: aux must be a dict of scalars or Means by name; got list. "
        "Return for example (loss, {'accuracy': Mean(correct, count)}).": lambda w, c, keys: (jnp.sum(w * c), [1.0]),
        "value_and_grad: aux 'each' must be a scalar or Mean(total, weight); got float32[1]. Sum over the examples and "
        "return Mean(total, weight), or their mean.": lambda w, c, keys: (jnp.sum(w * c), {"each": w * c}),
        "value_and_grad: aux 'norms.each' must be a scalar or Mean(total, weight); got float32[1]. "
        "Sum over the examples and return Mean(total, weight), or their mean.": lambda w, c, keys: (
            jnp.sum(w * c),
            {"norms": {"first": jnp.float32(1), "each": w * c}},
        ),
        "value_and_grad: aux 'norms.each' must be a scalar or Mean(total, weight); got Mean(NoneType, int). "
        "Sum over the examples and return Mean(total, weight), or their mean.": lambda w, c, keys: (
            jnp.sum(w * c),
            {"norms": sk.Mean({"each": None}, 1)},
        ),
        "value_and_grad: aux must be a dict of scalars or Means by name; got the key 1. "
        "Use a string.": lambda w, c, keys: (jnp.sum(w * c), {1: jnp.float32(1)}),
        "Mean: the weight must be float32 or an integer, because bfloat16 cannot count; got bfloat16. "
        "Sum it in float32, as Mean.of(values, weights) does.": bfloat16_weight,
        "Mean: the total must be float32, because bfloat16 rounds a sum to 2 digits; got bfloat16. "
        "Sum it in float32, as Mean.of(values, weights) does.": bfloat16_total,
    }.items(),
)
def test_a_loss_that_is_no_mean_is_refused(loss_fn, message, mesh4):
    init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(1.0), mesh=mesh4, plan=sk.dp("data"))
    with type_error(message):
        step(init(W, jax.random.key(0)), COEFFICIENTS)


def test_total_and_weight_must_vary_alike(mesh4):
    def loss_fn(w, c, keys):
        return sk.Mean(sk.all_reduce(jnp.sum(w * c), "data"), jnp.sum(c))

    init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(1.0), mesh=mesh4, plan=sk.dp("data"))
    with value_error(
        "Mean 'loss': total and weight must vary over the same axes; the total varies over none and the weight over "
        "'data', which differ in 'data'. Compute both from the same shards, or reduce both alike."
    ):
        step(init(W, jax.random.key(0)), COEFFICIENTS)


def test_a_loss_reduced_by_its_author_is_taken_as_it_is(mesh4):
    grad_fn = sk.value_and_grad(lambda w, c, keys: sk.all_reduce(jnp.sum(w * c), "data", op="mean"))
    job = {"mesh": mesh4, "plan": sk.dp("data"), "examples": "mixed"}  # a sum, of which the mean over devices is meant
    init, step = sk.make_train_step(grad_fn, optax.sgd(1.0), **job)
    state, metrics = step(init(W, jax.random.key(0)), COEFFICIENTS)
    assert (float(state.params), float(metrics["loss"])) == (1.0 - 70.0, 70.0)


def test_mean_of_sums_in_float32():
    ones = jnp.ones(4173, jnp.bfloat16)
    mean = sk.Mean.of(ones, ones)
    assert float(mean.weight) == 4173  # bfloat16 itself says 4160
    assert float(jnp.sum(ones)) == 4160
    assert (mean.total.dtype, mean.weight.dtype) == (jnp.float32, jnp.float32)


@pytest.mark.parametrize(
    "values, weights", [((4, 3), (4, 1)), ((4,), (4, 1)), ((4, 3), ()), ((4, 3), (3,)), ((4, 3), (3, 4))]
)
@pytest.mark.check
def test_weights_are_of_the_shape_of_the_values(values, weights):
    with value_error(
        f"Mean.of: the weights must have the shape of the values; got {weights} for {values}. Broadcast "
        "them with jnp.broadcast_to(weights, values.shape)."
    ):
        jax.eval_shape(sk.Mean.of, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (values, weights)))


def gated(stop):
    def loss_fn(w, c, keys):
        gate = jax.nn.sigmoid(c * w)
        weight = jnp.sum(jax.lax.scan(lambda s, g: (s + g, None), jnp.zeros_like(gate[0]), gate)[0])
        return sk.Mean(jnp.sum(gate * c), jax.lax.stop_gradient(weight) if stop else weight)

    return loss_fn


def test_a_weight_that_depends_on_the_parameters_is_refused(mesh4):
    init, step = sk.make_train_step(sk.value_and_grad(gated(False)), optax.sgd(1.0), mesh=mesh4, plan=sk.dp("data"))
    with type_error(
        "Mean: the weight of a loss must not depend on the parameters, because the step differentiates the total "
        "alone; this one does. Pass jax.lax.stop_gradient(weight), or divide in the loss and return a scalar."
    ):
        step(init(W, jax.random.key(0)), COEFFICIENTS)
    init, step = sk.make_train_step(sk.value_and_grad(gated(True)), optax.sgd(1.0), mesh=mesh4, plan=sk.dp("data"))
    state, _ = step(init(W, jax.random.key(0)), COEFFICIENTS)
    c = jnp.asarray(COEFFICIENTS)
    gate = lambda w: jax.nn.sigmoid(c * w)  # noqa: E731
    wanted = jax.grad(lambda w: jnp.sum(gate(w) * c))(1.0) / jnp.sum(gate(1.0))
    np.testing.assert_allclose(1.0 - float(state.params), float(wanted), rtol=1e-5)


def test_a_weight_that_is_whole_along_an_axis_that_splits_the_total_is_refused():
    """Lengths of sequences whose tokens are split: summed over that axis, each would count once per device."""
    mesh = sk.make_mesh(jax.devices()[:4], data=2, context=2)
    loss_fn = lambda w, b, keys: sk.Mean(jnp.sum(b["x"] * w), jnp.sum(b["n"]))  # noqa: E731
    evaluate = sk.make_eval_step(loss_fn, mesh=mesh, plan=sk.chain(sk.dp("data"), sk.cp("context")))
    with value_error(
        "Mean 'loss': total and weight must vary over the same axes; the total varies over 'context', 'data' and the "
        "weight over 'data', which differ in 'context'. Compute both from the same shards, or reduce both alike."
    ):
        evaluate(jnp.float32(1), {"x": np.ones((8, 16), np.float32), "n": np.full(8, 16, np.int32)})


@pytest.mark.parametrize(
    ("indexed", "sizes"),
    [("total", {"data": 1, "more": 2}), ("weight", {"data": 2, "more": 1})],
    ids=["a total", "a weight"],
)
def test_an_index_over_axes_of_which_one_has_one_device(indexed, sizes):
    """The batch does not vary over it, and what the index is in does: along one device that is no difference."""

    def loss_fn(w, c, keys):
        place = sk.axis_index(("data", "more")) * len(c) + jnp.arange(len(c))
        place = place.astype(jnp.float32)
        total, weight = c * w, c
        if indexed == "total":
            total = total * place
        else:
            weight = weight * place
        return sk.Mean(jnp.sum(total), jnp.sum(weight))

    plan = sk.chain(sk.dp("data"), sk.dp("more"))
    mesh = sk.make_mesh(jax.devices()[:2], **sizes)
    init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(1.0), mesh=mesh, plan=plan)
    state, metrics = step(init(W, jax.random.key(0)), COEFFICIENTS)
    plain, placed = COEFFICIENTS.sum(), COEFFICIENTS @ np.arange(4)
    total, weight = (placed, plain) if indexed == "total" else (plain, placed)
    found = [float(metrics["weight"]), float(metrics["loss"]), 1.0 - float(state.params)]
    np.testing.assert_allclose(found, [weight, total / weight, total / weight], rtol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_of_no_weight_changes_nothing(accumulate, mesh4):
    loss_fn = lambda w, c, keys: sk.Mean.of(w * c, 0 * c)  # noqa: E731
    step_of = lambda grad_fn: sk.make_train_step(  # noqa: E731
        grad_fn, optax.sgd(1.0), mesh=mesh4, plan=sk.dp("data"), accumulate=accumulate
    )
    init, step = step_of(sk.value_and_grad(loss_fn))
    state, metrics = step(init(W, jax.random.key(0)), np.arange(8.0, dtype=np.float32))
    assert (float(state.params), float(metrics["loss"]), float(metrics["weight"])) == (1.0, 0.0, 0.0)


def test_a_complex_loss_is_refused(mesh4):
    evaluate = sk.make_eval_step(lambda w, c, keys: jnp.sum(w * c) * 1j, mesh=mesh4, plan=sk.dp("data"))
    with (
        pytest.raises(
            TypeError, match=r"must return a scalar, Mean\(total, weight\) or \(either, aux\); got complex64"
        ),
        jax.numpy_dtype_promotion("standard"),
    ):
        evaluate(W, COEFFICIENTS)


def test_gradients_of_other_shapes_are_refused(mesh4):
    own = sk.value_and_grad(lambda p, c, keys: sk.Mean.of(c[:, None] * p["w"][None]))

    def cut(p, c, keys, *, scale=1):
        loss, aux, grads = own(p, c, keys, scale=scale)
        return loss, aux, {"w": grads["w"][:1]}

    def renamed(p, c, keys, *, scale=1):
        loss, aux, grads = own(p, c, keys, scale=scale)
        return loss, aux, {"v": grads["w"]}

    rule = "make_train_step: a GradFn must return a gradient of every parameter, with its shape"
    remedy = "Return the same as value_and_grad, or pytrees like it."
    for grad_fn, found in (
        (cut, "leaf w has (4,), its gradient (1,)"),
        (renamed, "got PyTreeDef({'v': *}) for PyTreeDef({'w': *})"),
    ):
        init, step = sk.make_train_step(grad_fn, optax.sgd(1.0), mesh=mesh4, plan=sk.dp("data"))
        with value_error(f"{rule}; {found}. {remedy}"):
            step(init({"w": jnp.ones(4)}, jax.random.key(0)), COEFFICIENTS)


# Catches elements that are summed with another's weight, a tree that comes back in another order, and arrays whose
# devices' parts are added up as if they were parts of a sum.
def test_auxiliary_means_are_arrays_and_trees(mesh4):
    def loss_fn(w, c, keys):
        first = sk.Mean(c, jnp.arange(2.0) * c)
        return jnp.sum(w * c), {"z": jnp.sum(c), "tree": (first, sk.Mean({"b": c, "a": 2 * c[:1]}, 2)), "a": 1.0}

    step = sk.make_eval_step(loss_fn, mesh=mesh4, plan=sk.dp("data"))
    coefficients = np.float32([[1, 2], [3, 4], [5, 6], [7, 8]]).reshape(8)
    metrics = jax.device_get(step(W, coefficients))
    tree = ((np.float32([16, 1])), {"a": np.float32([4]), "b": np.float32([2, 2.5])})
    jax.tree.map(np.testing.assert_array_equal, metrics["tree"], tree)
    assert (float(metrics["z"]), float(metrics["a"]), list(metrics)[:2]) == (9.0, 1.0, ["a", "loss"])


@pytest.mark.check
def test_arrays_that_cannot_be_summed_are_refused():
    mesh = sk.abstract_mesh(data=2, model=2)
    rows = lambda w, c, keys: (jnp.sum(c), {"rows": sk.Mean(w["w"] * c[0], 1)})  # noqa: E731
    weights = lambda w, c, keys: (jnp.sum(c), {"a": {"b": sk.Mean(c, c[:1])}})  # noqa: E731
    plan = sk.chain(sk.dp("data"), sk.tp("model", {"w": P("model")}))
    for message, loss_fn in {
        "Mean 'rows': an array may vary only over the axes of the batch; got float32[2], which varies over 'model' "
        "too. Pass all_gather(..., replicated=True) of parts of the array, or all_reduce(...) of parts of a sum.": rows,
        "Mean 'a.b': the weight must be a scalar or have the shape of the total; got "
        "Mean(float32[2], float32[1]). Broadcast it with jnp.broadcast_to(weight, total.shape).": weights,
    }.items():
        with value_error(message):
            jax.eval_shape(sk.make_eval_step(loss_fn, mesh=mesh, plan=plan), {"w": np.ones(4, "f")}, np.ones(4, "f"))
