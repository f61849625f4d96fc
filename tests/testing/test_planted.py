"""Each planted mistake is caught, by the tool that should catch it, in its own words."""

import math

import jax
import optax
import pytest

import shardkit as sk
from shardkit.testing import assert_matches_reference, assert_same_training, emulate
from support.planted.kernels import KERNELS, RIGHT
from support.planted.steps import OWN, PARAMS, STEPS, WEIGHTED


def use(row, **options):
    mesh = sk.make_mesh(jax.devices()[: math.prod(row.sizes.values())], **row.sizes)
    args, in_specs, out_specs = row.call
    layouts = {"in_specs": in_specs, "out_specs": out_specs}
    if row.tool == "emulate":
        emulate(row.kernel, row.sizes, **layouts)(*args)
    elif row.tool == "check_vma":
        jax.jit(jax.shard_map(row.kernel, mesh=mesh, **layouts))(*args)
    else:
        assert_matches_reference(row.kernel, row.reference, mesh=mesh, args=args, **layouts, **options)


@pytest.mark.parametrize("row", KERNELS, ids=lambda row: row.name.replace(" ", "_"))
def test_wrong_kernels(row):  # proves F72, T8
    error = AssertionError if row.tool == "assert_matches_reference" else ValueError
    with pytest.raises(error, match=row.says):
        use(row)


@pytest.mark.parametrize("name", RIGHT)
def test_without_the_mistake_they_pass(name):  # proves S43
    (row,) = [row for row in KERNELS if row.name == name]
    use(row._replace(kernel=RIGHT[name]), eager=False)


def trained(grad_fn, reference):
    mesh = sk.make_mesh(jax.devices()[:4], data=4)
    options = {"mesh": mesh, "plan": sk.dp("data"), "params": PARAMS, "batches": [WEIGHTED]}
    assert_same_training(grad_fn, reference, optax.sgd(0.1), **options)


# A loss that sends and is another one on each mesh is warned of at the first step, before the law refuses it.
@pytest.mark.filterwarnings("ignore::shardkit.on_device.advice.Unintended")
@pytest.mark.parametrize("row", STEPS, ids=lambda row: row.name.replace(" ", "_"))
def test_wrong_steps(row):
    with pytest.raises(AssertionError, match=row.says):
        trained(row.grad_fn, row.reference)


def test_the_right_step_passes_and_no_name_is_used_twice():
    trained(OWN, OWN)
    names = [row.name for row in (*KERNELS, *STEPS)]
    assert len(names) == len(set(names)) >= 27
