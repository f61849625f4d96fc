"""`sk.audit` on steps of flax nnx and equinox: faults with their lines, and right programs silent.

The lines that a finding may name end in a comment with the rule's name: the compiler merges the sums of both layers.
"""

import inspect

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk

LARGE = 2**15


def placed(tree, *spec):
    return jax.device_put(tree, NamedSharding(sk.make_mesh(data=4, model=2), P(*spec)))


def in_parts(tree):
    """Matrices split over both axes, vectors over one: what a right program holds, and returns."""
    mesh = sk.make_mesh(data=4, model=2)
    place = lambda x: NamedSharding(mesh, P(*("data", "model")[: x.ndim]))  # noqa: E731
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, place(x)), tree)


def batches(times=4):
    return placed(jnp.ones((times, 32, 64)), None, "data")


def nnx_step(fault):
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed: shardkit[test]")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(64, 128, rngs=rngs), nnx.Linear(128, 64, rngs=rngs)

        def __call__(self, x):
            hidden = jnp.tanh(self.up(x))  # summed-each-iteration, unplaced-leaf, replicated-leaf
            return self.down(hidden)  # summed-each-iteration, unplaced-leaf, replicated-leaf

    @nnx.jit
    def step(model, optimizer, xs):
        graph, params = nnx.split(model, nnx.Param)

        def loss(params, x):
            return jnp.mean(nnx.merge(graph, params)(x) ** 2)

        if fault == "summed-each-iteration":
            add = lambda total, x: (jax.tree.map(jnp.add, total, jax.grad(loss)(params, x)), None)  # noqa: E731
            grads, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), xs)
        else:
            grads = jax.grad(loss)(params, xs[0])
        if fault == "host-transfer":
            jax.debug.print("{}", loss(params, xs[0]))  # host-transfer
        optimizer.update(model, grads)
        if fault is None:
            nnx.update(model, in_parts(nnx.state(model)))

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    place = {"unplaced-leaf": lambda tree: tree, None: in_parts}.get(fault, placed)
    nnx.update(model, place(nnx.state(model)))
    nnx.update(optimizer, placed(nnx.state(optimizer)))
    return step, (model, optimizer, batches())


def equinox_step(fault):
    eqx = pytest.importorskip("equinox", reason="equinox is not installed: shardkit[test]")

    class Model(eqx.Module):
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __call__(self, x):
            hidden = jnp.tanh(self.up(x))  # summed-each-iteration, unplaced-leaf, replicated-leaf
            return self.down(hidden)  # summed-each-iteration, unplaced-leaf, replicated-leaf

    def loss(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    @eqx.filter_jit(donate="all")
    def step(model, xs):
        if fault == "summed-each-iteration":
            add = lambda total, x: (jax.tree.map(jnp.add, total, eqx.filter_grad(loss)(model, x)), None)  # noqa: E731
            grads, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_array)), xs)
        else:
            grads = eqx.filter_grad(loss)(model, xs[0])
        if fault == "host-transfer":
            jax.debug.print("{}", loss(model, xs[0]))  # host-transfer
        updates, _ = optax.sgd(0.1).update(grads, optax.sgd(0.1).init(grads))
        model = eqx.apply_updates(model, updates)
        return in_parts(model) if fault is None else model

    up, down = jax.random.split(jax.random.key(0))
    model = Model(eqx.nn.Linear(64, 128, key=up), eqx.nn.Linear(128, 64, key=down))
    place = {"unplaced-leaf": lambda tree: tree, None: in_parts}.get(fault, placed)
    arrays, rest = eqx.partition(model, eqx.is_array)
    return step, (eqx.combine(place(arrays), rest), batches())


@pytest.mark.quick(
    *("replicated-leaf-nnx_step", "unplaced-leaf-nnx_step"),
    *("host-transfer-equinox_step", "summed-each-iteration-equinox_step"),
)
@pytest.mark.parametrize("make", [nnx_step, equinox_step])
@pytest.mark.parametrize("fault", ["summed-each-iteration", "unplaced-leaf", "replicated-leaf", "host-transfer"])
@pytest.mark.optimized
def test_a_fault_in_a_framework_is_named_with_the_users_line(make, fault):
    step, args = make(fault)
    large = LARGE if fault == "replicated-leaf" else 2**24
    findings = sk.audit(step, *args, compiled=True, large=large, ignore=["second-compile"]).findings
    assert {f.rule for f in findings} == {fault}, findings
    lines, first = inspect.getsourcelines(make)
    marked = {first + n for n, line in enumerate(lines) if "# " in line and fault in line.split("# ")[-1]}
    assert {f.source.split(" ")[0] for f in findings} <= {f"test_frameworks.py:{n}" for n in marked}, findings


@pytest.mark.parametrize("make", [nnx_step, equinox_step])
@pytest.mark.optimized
def test_a_right_program_of_a_framework_is_silent(make):
    step, args = make(None)
    before = jax.tree.map(jnp.copy, [leaf for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array)])
    audit = sk.audit(step, *args, compiled=True, large=LARGE)
    assert audit.findings == () and audit.skipped == () and audit.devices == 8
    after = [leaf for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array)]
    assert all((a == b).all() for a, b in zip(before, after, strict=True)), "the audit changed the arguments"


@pytest.mark.check
@pytest.mark.parametrize("framework", ["flax.nnx", "equinox"])
def test_census_and_explain_read_a_function_of_a_framework(framework):
    """They traced it by jax's own means: another type of trace, or a result that is no array, ended them."""
    library = pytest.importorskip(framework, reason=f"{framework} is not installed: shardkit[test]")
    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    loss = lambda w, x: jnp.mean((x @ w) ** 2)  # noqa: E731
    gradient = jax.shard_map(jax.grad(loss), mesh=sk.abstract_mesh(data=2), **specs)

    def step(model, x, label="step"):
        return gradient(model, x), label

    args = jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.ShapeDtypeStruct((8, 4), jnp.float32)
    if framework == "equinox":
        step, options = library.filter_jit(step), {"label": "other"}
    else:
        step, options = library.jit(lambda model, x: gradient(model, x)), {}
    assert [row.kind for row in sk.census(step, *args, **options).rows] == ["all_reduce"]
    assert [reason.value for reason in sk.explain(step, *args, **options)] == ["w"]
    assert sk.lint(step, *args, **options) == []
