"""Which equations the results of a program depend on, beside what jax removes as dead code."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit._jax import compat
from shardkit._jax.dependence import without_unused
from shardkit._jax.jaxprs import walk
from shardkit.analysis.jaxpr.liveness import Liveness
from support.planted.divergent import MESH, X, on

pytestmark = pytest.mark.check


def shift(x):
    return sk.shift(x, "model")


def first(x, other):
    """The first of two values, doubled: what is passed for the second one is not read."""
    return 2 * x


def in_scan(x):
    return lax.scan(lambda carry, _: ((2 * carry[0], shift(carry[1])), None), (x, x), length=3)[0][0]


def in_while(x):
    def body(carry):
        count, x, other = carry
        return count + 1, 2 * x, shift(other)

    return lax.while_loop(lambda carry: carry[0] < 3, body, (0, x, x))[1]


def in_branch(x):
    return lax.cond(jnp.sum(sk.all_reduce(x, ("data", "model"))) > 0, lambda x: first(x, shift(x)), jnp.sin, x)


def in_nested_shard_map(x):
    here = jax.sharding.get_abstract_mesh()
    specs = {"in_specs": P("model"), "out_specs": P("model"), "axis_names": {"model"}}
    return jax.shard_map(lambda x: first(x, shift(x)), mesh=here, **specs)(x)


@jax.custom_jvp
def with_jvp(x, other):
    return first(x, other)


@jax.custom_vjp
def with_vjp(x, other):
    return first(x, other)


with_jvp.defjvp(lambda primals, tangents: (2 * primals[0], 2 * tangents[0]))
with_vjp.defvjp(lambda x, other: (2 * x, None), lambda _, cotangent: (2 * cotangent, jnp.zeros_like(cotangent)))

# A shift that nobody reads, in or for each primitive that holds a program.
UNREAD = {
    "shard_map": on(lambda x: first(x, shift(x))),
    "jit": on(lambda x: jax.jit(first)(x, shift(x))),
    "checkpoint": on(lambda x: jax.checkpoint(first)(x, shift(x))),
    "cond": on(in_branch),
    "scan": on(in_scan),
    "while": on(in_while),
    "nested shard_map": jax.shard_map(
        in_nested_shard_map, mesh=MESH, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    ),
    "custom_jvp": on(lambda x: with_jvp(x, shift(x))),
    "custom_vjp": on(lambda x: with_vjp(x, shift(x))),
}
# Where jax keeps it. If a row leaves, `without_unused` may do what `Liveness` does.
KEPT_BY_JAX = {"custom_jvp", "custom_vjp"}
if jax.__version_info__ < (0, 12):
    KEPT_BY_JAX |= {"while"}


@pytest.mark.parametrize("name", UNREAD)
def test_an_unread_shift_is_told_wherever_it_is_and_also_where_jax_keeps_it(name):
    program = jax.make_jaxpr(UNREAD[name])(X)
    liveness = Liveness(program.jaxpr)
    left_by_jax = {id(site.equation) for site in walk(without_unused(program).jaxpr)}
    names = []
    for site in walk(program.jaxpr):
        if site.name == "ppermute":
            assert not liveness.reads(site.equation)
            assert (id(site.equation) in left_by_jax) == (name in KEPT_BY_JAX)
        names.append(site.name)
    assert names.count("ppermute") == 1


@pytest.mark.parametrize("name", [name for name in UNREAD if name != "while"])  # jax differentiates no while loop
def test_what_jax_removes_of_a_gradient_is_not_read(name):
    program = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(UNREAD[name](x) ** 2)))(X)
    liveness = Liveness(program.jaxpr)
    left_by_jax = {id(site.equation) for site in walk(without_unused(program).jaxpr)}
    removed = []
    for site in walk(program.jaxpr):
        # jax writes the equations that hold programs anew; the others it keeps as they are.
        if not compat.inner_jaxprs(site.equation) and id(site.equation) not in left_by_jax:
            removed.append(site.equation)
    assert removed
    assert not any(liveness.reads(equation) for equation in removed)
