"""Residuals of error feedback in a checkpoint: the same bits on the same mesh, the same sum on another."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk
from support import linear
from support.checkpoint_runs import restored, save
from support.conformance import padding
from support.refusals import refused
from support.trees import assert_laid_out

KEY = jax.random.key(3)
FED = sk.algorithms.compressed(jnp.int4, block=8, feedback=True)


def make(sizes, plan):
    mesh = sk.make_mesh(jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)
    return sk.make_train_step(sk.value_and_grad(linear.loss()), optax.sgd(1.0), mesh=mesh, plan=plan)


FOUR = make({"data": 4}, sk.dp("data", reduce=FED))
PLAIN = make({"data": 4}, sk.dp("data"))
# Eight rows are read whole for four; four are split along no dim of the bias over three devices.
ELSEWHERE = {
    "one device": make({"data": 1}, sk.dp("data", reduce=FED)),
    "three": make({"data": 3}, sk.dp("data", reduce=FED)),
    "eight, zero1": make({"data": 8}, sk.zero1("data", min_size=1, reduce=FED)),
    "padded parts": make({"node": 2, "gpu": 4}, sk.chain(sk.dp("node", reduce=FED), sk.fsdp("gpu", **padding(4)))),
}
LEAVES = "3 leaves ('residuals.bias', 'residuals.shift', 'residuals.weight')"


def run(step, state, batches):
    for batch in batches:
        state, _ = step(state, batch)
    return state


def restore(directory, init, **options):
    return restored(directory, init.abstract(linear.params()), **options)[0]


def host(tree):
    return jax.device_get(sk.unpadded(tree))


def sums(residuals):
    return jax.tree.map(lambda x: np.asarray(x, np.float64).sum(0), host(residuals))


def close(ours, theirs):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-5), ours, theirs)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with a state after two steps, and what it holds."""
    directory = tmp_path_factory.mktemp("residuals")
    init, step = FOUR
    state = run(step, init(linear.params(), KEY), [linear.batch(0), linear.batch(1)])
    held = host((state.params, state.residuals))
    save(directory, state)
    return directory, held


# A run that is restarted goes on bit by bit: a residual that is not saved would show in the next step.
def test_restart_on_the_same_mesh(saved):
    directory, _ = saved
    init, step = FOUR
    batches = [linear.batch(i) for i in range(3)]
    through = run(step, init(linear.params(), KEY), batches)
    again = run(step, restore(directory, init), batches[2:])
    jax.tree.map(np.testing.assert_array_equal, *(host((s.params, s.residuals)) for s in (again, through)))


# With SGD at a rate of 1 the parameters are what was applied: with what is left they are the exact gradients.
@pytest.mark.quick("three", "padded parts")
@pytest.mark.parametrize("name", ELSEWHERE)  # proves N2
def test_restart_on_another_mesh_keeps_the_sum(name, saved):
    directory, (params, residuals) = saved
    init, step = ELSEWHERE[name]
    state, target = restore(directory, init), init.abstract(linear.params())
    close(sums(state.residuals), sums(residuals))
    jax.tree.map(np.testing.assert_array_equal, host(state.params), params)
    assert_laid_out(state, target)
    rows = np.asarray(host(state.residuals)["weight"])
    np.testing.assert_array_equal(rows, np.broadcast_to(rows[:1], rows.shape))  # each device has its share
    if name == "one device":  # which adds them at once
        after = run(step, state, [linear.batch(2)])
        wanted = linear.gradients([linear.batch(i) for i in range(3)])
        close(jax.tree.map(lambda p, r: r - p, host(after.params), sums(after.residuals)), wanted)


# And back: rows of padded parts, read on fewer devices.
def test_padded_parts_come_back(saved, tmp_path):
    state = restore(saved[0], ELSEWHERE["padded parts"].init)
    save(tmp_path, state)
    close(sums(restore(tmp_path, FOUR.init).residuals), sums(saved[1][1]))


# Nothing is dropped, and nothing begins with zeros, unless the call says so.
def test_only_one_of_the_two_has_residuals(saved, tmp_path):
    directory, (params, _) = saved
    assert refused(lambda: restore(directory, PLAIN.init)) == (
        f"restore: step 2 of '{directory}' has the residuals of error feedback, for {LEAVES}, and the plan of this "
        "state has none. Pass residuals='reset' to drop them, or restore into a state of a plan with feedback."
    )
    without = restore(directory, PLAIN.init, residuals="reset")
    jax.tree.map(np.testing.assert_array_equal, host(without.params), params)
    assert without.residuals is None
    save(tmp_path, without)
    assert refused(lambda: restore(tmp_path, FOUR.init)) == (
        f"restore: step 2 of '{tmp_path}' lacks the residuals of error feedback, which the plan of this state needs "
        f"for {LEAVES}. Pass residuals='reset' to begin with zeros, or restore into a state of a plan without feedback."
    )
    for init in (FOUR.init, ELSEWHERE["padded parts"].init):
        state = restore(tmp_path, init, residuals="reset")
        assert not any(np.any(x) for x in jax.tree.leaves(host(state.residuals)))
        assert_laid_out(state, init.abstract(linear.params()))
    assert refused(lambda: restore(directory, FOUR.init, residuals="zeros")) == (
        "restore: residuals must be 'keep' or 'reset'; got 'zeros'. Pass for example residuals='keep'."
    )
