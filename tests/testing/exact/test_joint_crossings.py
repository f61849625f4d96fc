"""What differs only where a comparison changes its answer for all elements of a row, or of an array, at once."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk

SCALE = np.array([1.5, 2, 3.5, 0.25], np.float32)[None]

WRONG = {
    "the smallest of a masked row": (
        lambda x: jnp.min(jnp.where(x * SCALE == 0.7, x, 0), 1),
        lambda x: jnp.zeros(len(x)),
    ),
    "the smallest of what rounds to a number": (
        lambda x: jnp.min(jnp.where(jnp.floor(x * SCALE) == 6, x, 0), 1),
        lambda x: jnp.zeros(len(x)),
    ),
    "a mean of none": (
        lambda x: jnp.sum(x * SCALE < 0.7, 1) / jnp.maximum(jnp.sum(x * SCALE < 0.7, 1), 1),
        lambda x: jnp.sum(x * SCALE <= 0.7, 1) / jnp.maximum(jnp.sum(x * SCALE <= 0.7, 1), 1),
    ),
    "of columns, read from behind": (
        lambda x: jnp.min(jnp.where((x * SCALE.T)[::-1].T == 0.7, 1, 0), 1),
        lambda x: jnp.zeros(len(x), int),
    ),
}


def prove(kernel, reference):
    return sk.testing.assert_equal_for_all_inputs(
        kernel,
        reference,
        mesh=sk.abstract_mesh(data=1),
        in_specs=P("data"),
        out_specs=P("data"),
        args=(np.zeros((4, 4), np.float32),),
        grad=False,
    )


# Catches proofs that put one element after the other: four at once meet by chance in no draw of thousands.
@pytest.mark.parametrize("name", WRONG)
def test_a_row_is_put_at_once(name):
    with pytest.raises(AssertionError, match="is not the reference's for all inputs"):
        prove(*WRONG[name])


# Catches a false alarm for such a row.
def test_what_holds_for_such_a_row_is_proved():
    proof = prove(
        lambda x: jnp.min(jnp.where(x * SCALE == 0.7, 1, 0), 1),
        lambda x: jnp.where(jnp.all(x * SCALE == 0.7, 1), 1, 0),
    )
    assert proof.chance < 1e-15
