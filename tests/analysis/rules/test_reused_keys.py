"""One key in two draws: found wherever the key comes from, and silent where the draws differ or are one."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax, random
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.analysis import lint
from support import pipelines
from support.planted.divergent import KEY

pytestmark = pytest.mark.check
X, W = jax.ShapeDtypeStruct((4, 3), jnp.float32), jnp.ones((5, 3, 3))
KEYS = jax.ShapeDtypeStruct((4,), KEY.dtype)


def drop(x, key):
    return jnp.where(random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)


def found(fn, *args):
    return [each for each in lint(fn, *args, small=0) if each.rule == "reused-key"]


def in_a_python_loop(key, x):
    for w in W:
        x = drop(x @ w, key)
    return x


def in_shard_map(keys, x):
    twice = lambda k, x: sk.dropout(sk.dropout(x, k, 0.1), k, 0.1)  # noqa: E731
    return jax.shard_map(twice, mesh=sk.abstract_mesh(data=4), in_specs=P("data"), out_specs=P("data"))(keys, x)


# Each catches a way in which two keys are the same that the others do not: by name, by what made them, through a call,
# a branch, a carry that never changes, a batch of keys, an old key, a loop inside another.
WRONG = {
    "in a Python loop": (in_a_python_loop, KEY),
    "on every device": (in_shard_map, KEYS),
    "of other numbers": (lambda key, x: (random.normal(key, (3,)), random.uniform(key, (4,))), KEY),
    "of a primitive of its own": (lambda key, x: (random.gamma(key, x), random.gamma(key, x)), KEY),
    "folded twice alike": (lambda key, x: drop(drop(x, random.fold_in(key, 1)), random.fold_in(key, 1)), KEY),
    "split twice alike": (lambda key, x: drop(drop(x, random.split(key)[0]), random.split(key)[0]), KEY),
    "in a call": (lambda key, x: jax.jit(drop)(jax.jit(drop)(x, key), key), KEY),
    "before a branch": (lambda key, x: lax.cond(x[0, 0] > 0, lambda x: drop(x, key), jnp.sin, drop(x, key)), KEY),
    "one seed": (lambda key, x: drop(drop(x, random.PRNGKey(1)), random.PRNGKey(1)), KEY),
    "in a recomputed function": (lambda key, x: jax.checkpoint(lambda x: drop(drop(x, key), key))(x), KEY),
    "over a batch": (lambda keys, x: jax.vmap(lambda k, x: drop(drop(x, k), k))(keys, x), KEYS),
    "carried round a scan": (
        lambda key, x: lax.scan(lambda c, w: ((drop(c[0] @ w, c[1]), c[1]), None), (x, key), W)[0],
        KEY,
    ),
    "in a while loop": (lambda key, x: lax.while_loop(lambda x: x[0, 0] > 0, lambda x: drop(x, key), x), KEY),
    "folded with the outer loop's turn alone": (
        lambda key, x: lax.fori_loop(
            0, 5, lambda i, x: lax.fori_loop(0, 3, lambda _, x: drop(x, random.fold_in(key, i)), x), x
        ),
        KEY,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_one_key_in_two_draws(name):
    fn, key = WRONG[name]
    assert len(found(fn, key, X)) == 1
    differentiated = jax.grad(lambda x, key: sum(jnp.sum(y) for y in jax.tree.leaves(fn(key, x)) if y.dtype == x.dtype))
    # jax takes what is the same in every turn out of a loop that it differentiates.
    if name == "in a Python loop" or not ("scan" in name or "loop" in name):
        assert len(found(differentiated, X, key)) == 1


def split_and_carried(key, x):
    def layer(carry, w):
        x, key = carry
        key, mine = random.split(key)
        return (drop(x @ w, mine), key), None

    return lax.scan(layer, (x, key), W)[0][0]


def scanned(body):
    return lambda key, x: lax.scan(lambda x, each: (body(x, key, *each), None), x, (W, jnp.arange(5)))[0]


def turn_by_turn(x, key, w, i):
    return jnp.sin(drop(x @ w, random.fold_in(key, i)))


def all_of_jax_random(key, x):
    """Those that draw more than once, in loops or branches of their own."""
    draws = (random.gamma, random.beta, random.poisson, random.permutation, random.randint, random.truncated_normal)
    args = ((x,), (x, x), (x,), (x,), ((3,), 0, 9), (0.0, 1.0))
    others = (random.dirichlet, random.categorical, random.ball, random.binomial, random.orthogonal, random.gumbel)
    args += ((jnp.ones(3),), (x,), (3,), (9.0, x[:, 0] * 0 + 0.5), (3,), ())
    keys = random.split(key, len(args))
    return [draw(k, *each) for draw, k, each in zip(draws + others, keys, args, strict=True)]


@jax.custom_vjp
def rule_of_its_own(x, key):
    return drop(jnp.sin(x), key)


rule_of_its_own.defvjp(
    lambda x, key: (drop(jnp.sin(x), key), (x, key)), lambda kept, g: (drop(g * jnp.cos(kept[0]), kept[1]), None)
)

RIGHT = {
    "recomputed in a rule of its own": (lambda key, x: jnp.cos(rule_of_its_own(x, key)), KEY),
    "split": (lambda key, x: drop(drop(x, random.split(key)[0]), random.split(key)[1]), KEY),
    "folded": (lambda key, x: drop(drop(x, key), random.fold_in(key, 1)), KEY),
    "keys of examples": (
        lambda keys, x: sk.dropout(sk.dropout(x, sk.fold_keys(keys, 0), 0.1), sk.fold_keys(keys, 1), 0.1),
        KEYS,
    ),
    "meant": (lambda key, x: drop(drop(x, key), random.clone(key)), KEY),
    "meant twice": (lambda key, x: drop(drop(x, random.clone(key)), random.clone(key)), KEY),
    "recomputed": (lambda key, x: jax.checkpoint(lambda x: jnp.sin(drop(jnp.sin(x), key)))(x), KEY),
    "folded with the turn": (scanned(turn_by_turn), KEY),
    "folded with the turn and recomputed": (scanned(jax.checkpoint(turn_by_turn)), KEY),
    "split and carried": (split_and_carried, KEY),
    "of microbatches": (
        lambda keys, x: lax.scan(lambda c, each: (c + drop(each[1], each[0]), None), x[0], (keys, x))[0],
        KEYS,
    ),
    "in two branches": (
        lambda key, x: lax.cond(x[0, 0] > 0, lambda x: drop(x, key), lambda x: drop(2 * x, key), x),
        KEY,
    ),
    "a loop of one turn": (lambda key, x: lax.scan(lambda x, _: (drop(x, key), None), x, length=1)[0], KEY),
}


@pytest.mark.parametrize("name", RIGHT)
def test_draws_that_differ_or_are_one(name):
    fn, key = RIGHT[name]
    assert found(fn, key, X) == []
    assert found(jax.grad(lambda x, key: jnp.sum(fn(key, x))), X, key) == []


def test_no_function_of_jax_random_draws_twice_from_a_key():
    assert found(all_of_jax_random, KEY, X) == []


def twice(key, x):
    first = random.bernoulli(key, 0.9, (4, 3))
    return jnp.where(first & random.bernoulli(key, 0.9, (4, 3)), x, 0)


def looped(key, x):
    return lax.scan(lambda x, w: (x * random.normal(key, (3,))[None], None), x, W)[0]


def test_the_lines_of_both_draws_and_of_the_loop():
    remedy = (
        "Split the key, or fold a number into it for each draw, as fold_keys does; jax.random.clone(key) declares "
        "equal numbers intended."
    )
    line = twice.__code__.co_firstlineno
    assert [str(each) for each in lint(twice, KEY, X)] == [
        f"test_reused_keys.py:{line + 2} (twice): reused-key: random numbers of shape (4, 3) come from the same bits "
        f"as those drawn at test_reused_keys.py:{line + 1} (twice): both draws use one key. {remedy}"
    ]
    line = looped.__code__.co_firstlineno + 1
    assert [str(each) for each in lint(looped, KEY, X)] == [
        f"test_reused_keys.py:{line} (looped.<locals>.<lambda>): reused-key: random numbers of shape (3,) come from "
        f"the same bits in every iteration of the scan at test_reused_keys.py:{line} (looped): each uses the same "
        f"key. {remedy}"
    ]


@jax.jit
def normal(key):
    first = random.uniform(key)
    return first + random.uniform(key)


# Catches a function that is taken for jax's because it is named like one: both draws were at the line that calls it.
def test_a_users_function_with_the_name_of_one_of_jax_has_lines_of_its_own():
    line = normal.__wrapped__.__code__.co_firstlineno
    [finding] = found(lambda key: normal(key) + 1, KEY)
    assert finding.source == f"test_reused_keys.py:{line + 3} (normal)"
    assert f"as those drawn at test_reused_keys.py:{line + 2} (normal)" in finding.message


def test_a_pipelines_backward_pass_draws_again_what_its_forward_pass_drew():
    """The embedding was blamed, which each of both runs."""
    step = pipelines.traced_step(sk.schedules.one_f_one_b(2, 2), 2, recompute=True)
    keys = jax.eval_shape(lambda: sk.example_keys(random.key(0), 4))
    assert found(step, jax.eval_shape(lambda: pipelines.make_params(2)), pipelines.make_batch(4), keys) == []
