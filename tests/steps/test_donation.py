"""Donation: a step reuses the buffers of the old state, and no two leaves of a state share a buffer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk
from support.refusals import value_error

pytestmark = pytest.mark.usefixtures("standard_promotion")
PLANS = {
    "dp": lambda: sk.dp("d"),
    "zero1": lambda: sk.zero1("d", min_size=1),
    "zero2": lambda: sk.zero2("d", min_size=1),
    "fsdp": lambda: sk.fsdp("d", min_size=1),
}
POLICIES = {
    "float32": sk.Precision(),
    "float32 with a float32 master": sk.Precision(master=jnp.float32),
    "bfloat16 with a float32 master": sk.Precision(param=jnp.bfloat16, compute=jnp.bfloat16, master=jnp.float32),
}
BATCH = {"x": np.ones((8, 16), np.float32), "y": np.ones((8, 8), np.float32)}


def loss(params, batch, keys):
    return sk.Mean.of((jnp.tanh(batch["x"]) @ params["w"] + params["b"][None] - batch["y"]).astype("f") ** 2)


def built(plan, policy, optimizer):
    mesh = sk.make_mesh(jax.devices()[:4], d=4)
    init, step = sk.make_train_step(
        sk.value_and_grad(loss), optimizer, mesh=mesh, plan=PLANS[plan](), precision=POLICIES[policy]
    )
    params = {"w": jnp.ones((16, 8)) / 7, "b": jnp.zeros(8)}
    return init(params, jax.random.key(0)), step, params


def buffers(tree):
    return [shard.data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) for shard in x.addressable_shards]


@pytest.mark.quick("dp-float32", "zero2-float32 with a float32 master", "fsdp-bfloat16 with a float32 master")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.optimized
def test_every_byte_of_the_state_is_written_in_place(plan, policy):  # proves F51, S65
    state, step, _ = built(plan, policy, optax.adamw(1e-3))
    state = state._replace(key=None)  # the key bypasses the compiled program
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    keyed = state._replace(key=jax.random.key(0))
    assert step.lower(keyed, BATCH).compile().memory_analysis().alias_size_in_bytes == held


@pytest.mark.quick(
    "adamw-zero1-float32 with a float32 master",
    "schedule_free-fsdp-float32",
    "adamw-fsdp-bfloat16 with a float32 master",
)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "optimizer", [optax.adamw(1e-3), optax.contrib.schedule_free(optax.sgd(1e-3), 1e-3)], ids=["adamw", "schedule_free"]
)
def test_no_two_leaves_share_a_buffer(plan, policy, optimizer):  # proves F51
    """With float32 parameters a cast to the master's dtype does not copy: the same buffer would be donated twice."""
    state, step, params = built(plan, policy, optimizer)
    copied = buffers(params)
    for _ in range(2):
        found = buffers(state._replace(key=None))
        assert len(set(found)) == len(found) and not set(found) & set(copied)
        state, _ = step(state, BATCH)
    np.testing.assert_array_equal(params["b"], np.zeros(8))  # the caller's own arrays are still there
    assert state.params["w"].is_deleted() is False


def test_a_state_that_is_used_up_is_refused(data8):
    grad_fn = sk.value_and_grad(lambda p, b, k: sk.Mean.of(b @ p))
    init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=data8, plan=sk.dp("data"))
    state = init(np.ones((4, 1), np.float32), jax.random.key(0))
    kept = jax.tree.map(jnp.copy, state)
    newest, _ = step(state, np.ones((8, 4), np.float32))
    for leaf, used in (("step", state), ("params", newest._replace(params=state.params))):
        with value_error(
            f"step: the state must be the newest; an earlier step was passed its leaf {leaf} and donated the buffer. "
            "Pass the state that step returned, copy one that you want to keep, jax.tree.map(jnp.copy, state), or pass "
            "make_train_step(..., donate=False)."
        ):
            step(used, np.ones((8, 4), np.float32))
    assert int(step(newest, np.ones((8, 4), np.float32))[0].step) == 2
    assert int(step(kept, np.ones((8, 4), np.float32))[0].step) == 1


def test_a_state_that_is_not_donated_can_be_used_again(data8):
    grad_fn = sk.value_and_grad(lambda p, b, k: sk.Mean.of(b @ p))
    options = {"mesh": data8, "plan": sk.fsdp("data", min_size=1), "donate": False}
    init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), **options)
    state, batch = init(np.ones((8, 1), np.float32), jax.random.key(0)), np.ones((8, 8), np.float32)
    np.testing.assert_array_equal(step(state, batch)[0].params, step(state, batch)[0].params)
