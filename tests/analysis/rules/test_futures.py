"""Collectives that are started and awaited, and functions that order a program: in census, lint, emulate and proof."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.lax import parallel
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.testing import assert_equal_for_all_inputs, emulate

pytestmark = pytest.mark.skipif(
    not hasattr(lax, "psum_scatter_start"), reason="jax has no public start of a collective before 0.12"
)
N = 4
X = np.arange(32, dtype=np.float32)
ROWS = X.reshape(N, 8)
RING = [(0, 1), (1, 2), (2, 3), (3, 0)]


def mesh():
    return sk.make_mesh(jax.devices()[:N], d=N)


def on_mesh(kernel, check_vma=True):
    return jax.jit(jax.shard_map(kernel, mesh=mesh(), in_specs=P("d"), out_specs=P("d"), check_vma=check_vma))


def in_a_function(x):
    future = jax.jit(lambda x: parallel.all_gather_start(x, "d", tiled=True))(x)
    return jax.jit(lambda future: future.done()[:2])(future)


def under_checkpoint(x):
    return jax.checkpoint(lambda x: parallel.all_gather_start(x, "d", tiled=True).done().sum())(x)[None]


# By kernel: the bytes that a device sends, and the same function of the whole array on one device.
KERNELS = {
    "sum": (lambda x: parallel.psum_start(x, "d").done(), 48, lambda x: jnp.tile(x.reshape(N, 8).sum(0), N)),
    "scatter": (lambda x: lax.psum_scatter_start(x, "d", tiled=True).done(), 24, lambda x: x.reshape(N, 8).sum(0)),
    "gather": (lambda x: parallel.all_gather_start(x, "d", tiled=True).done(), 96, lambda x: jnp.tile(x, N)),
    "ring": (lambda x: parallel.ppermute_start(x, "d", RING).done(), 32, lambda x: jnp.roll(x, 8)),
    "exchange": (
        lambda x: parallel.all_to_all_start(x.reshape(N, 2), "d", 0, 0, tiled=True).done().ravel(),
        24,
        lambda x: x.reshape(N, N, 2).swapaxes(0, 1).ravel(),
    ),
    "in a function": (in_a_function, 96, lambda x: jnp.tile(x[:2], N)),
    "under jax.checkpoint": (under_checkpoint, 96, lambda x: jnp.tile(x.sum()[None], N)),
}


# proves N58, N63 in part: a started collective is one in census, lint, emulate and proof
def test_a_collective_that_is_started_and_awaited_is_one():
    for name, (kernel, sent, reference) in KERNELS.items():
        program = on_mesh(kernel)
        assert sk.census(program, X).sent() == sent, name
        assert sk.lint(program, X, small=0) == [], name
        emulated = emulate(kernel, {"d": N}, P("d"), P("d"))(X)
        np.testing.assert_array_equal(emulated, reference(X), err_msg=name)
        options = {"mesh": mesh(), "in_specs": P("d"), "out_specs": P("d"), "args": [X], "grad": False}
        assert 0 < assert_equal_for_all_inputs(kernel, reference, **options).chance < 1e-20
        with pytest.raises(AssertionError, match="is not the reference's for all inputs"):
            assert_equal_for_all_inputs(kernel, lambda x, f=reference: f(x) + x[0], **options)
    assert len(sk.census(on_mesh(KERNELS["scatter"][0]), X).rows) == 1


# What XLA's CPU devices compute: a future in a function of its own has no form there yet.
def test_devices_compute_what_one_device_does():
    for name in ("sum", "scatter", "gather", "ring", "exchange"):
        kernel, _, reference = KERNELS[name]
        np.testing.assert_array_equal(on_mesh(kernel)(X), reference(X), err_msg=name)


def behind_a_barrier(x):
    return lax.optimization_barrier(lax.psum_scatter_start(x, "d", tiled=True)).done()


def forgotten(x):
    lax.psum_scatter_start(x, "d", tiled=True)
    return x


def forgotten_in_a_function(x):
    jax.jit(lambda x: lax.psum_scatter_start(x, "d", tiled=True))(x)
    return x


def dropped(x):
    lax.psum_scatter_start(x, "d", tiled=True).done()
    return x


def awaited_in_a_branch(x):
    future = lax.psum_scatter_start(x, "d", tiled=True)
    return lax.cond(x[0] > 1, lambda future: future.done(), lambda future: x[:2], future)


def started_in_a_branch(x):
    future = lax.cond(
        x[0] > 1,
        lambda: lax.psum_scatter_start(x, "d", tiled=True),
        lambda: lax.psum_scatter_start(2 * x, "d", tiled=True),
    )
    return future.done()


def carried(x):
    def body(future, _):
        return parallel.ppermute_start(future.done(), "d", RING), None

    return lax.scan(body, parallel.ppermute_start(x, "d", RING), None, length=3)[0].done()


# proves N58, N63 in part: futures that nobody awaits, or only in a branch
def test_futures_that_are_not_awaited_where_they_must_be():
    for kernel in (forgotten, forgotten_in_a_function):
        (finding,) = sk.lint(on_mesh(kernel), X, small=0)
        assert finding.rule == "unawaited-start" and kernel.__name__ in finding.source
        assert "is started and never awaited" in finding.message and "float32[8]" in finding.message
        assert "reduce-scatter" not in on_mesh(kernel).lower(X).compile().as_text()
    assert sk.lint(on_mesh(behind_a_barrier), X, small=0) == []
    (finding,) = sk.lint(on_mesh(dropped), X, small=0)
    assert finding.rule == "unread-message"
    for kernel, where in ((awaited_in_a_branch, "cond"), (started_in_a_branch, "cond"), (carried, "scan")):
        program = on_mesh(kernel, check_vma=False)
        findings = [finding for finding in sk.lint(program, X, small=0) if finding.rule == "unawaited-start"]
        assert findings and all(f"goes into a {where}, and does not compile there" in f.message for f in findings)
        with pytest.raises(jax.errors.JaxRuntimeError):
            program.lower(X).compile()


# proves N63 in part: a program in a given order, and a group that is scheduled together
def test_functions_that_order_a_program():
    from jax.experimental.overlap import program_order
    from jax.experimental.scheduling_groups import scheduling_group

    def two_sums(x):
        return 2 * lax.psum(x, "d") + lax.psum(x * x, "d")

    def reference(x):
        return 2 * x.reshape(N, 8).sum(0) + (x * x).reshape(N, 8).sum(0)

    for ordered in (program_order(two_sums, enforce=True), scheduling_group("both")(two_sums)):

        def kernel(x, ordered=ordered):
            return ordered(x)

        program = jax.shard_map(kernel, mesh=mesh(), in_specs=P("d"), out_specs=P())
        assert sk.census(program, X).sent() == 96 and sk.lint(program, X) == []
        np.testing.assert_array_equal(emulate(kernel, {"d": N}, P("d"), P())(X), reference(X))
        options = {"mesh": mesh(), "in_specs": P("d"), "out_specs": P(), "args": [X]}
        assert_equal_for_all_inputs(kernel, reference, **options)
        with pytest.raises(AssertionError, match="is not the reference's"):
            assert_equal_for_all_inputs(kernel, lambda x: reference(x) + x[:8], **options)
