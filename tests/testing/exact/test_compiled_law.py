"""The compiled step of rows of the covering list is the traced one, for all parameters and floats of a batch."""

import jax
import numpy as np
import optax
import pytest

import shardkit as sk
from shardkit.testing.exact.compiled_law import compiled
from shardkit.testing.program import Program
from shardkit.testing.rows import Row
from support import rows
from support.training import lenient

pytestmark = pytest.mark.optimized

ROWS = 36  # all seen to be proved with jax 0.10 and 0.12


# proves N49: also behind the compiler
@pytest.mark.quick("1")
@pytest.mark.parametrize("number", range(ROWS))
def test_rows_of_the_covering_list(number, monkeypatch):
    """Alone in running the reader of modules on steps with every option."""
    program = rows.program_of(rows.shrink_case(monkeypatch, number))
    note = compiled(program, None)  # a row that is refuted raises
    assert note is None or note.startswith("equal; assumed: ")


def make_program(optimizer):
    def loss(params, batch, keys):
        return sk.Mean((batch["x"] @ params["w"]).sum(), batch["x"].shape[0])

    params = {"w": np.ones(3, np.float32)}
    batch = {"x": np.ones((4, 3), np.float32)}
    row = Row({"data": 2}, sk.dp("data"), sk.value_and_grad(loss), optimizer=optimizer)
    return Program.of(row, row.grad_fn, optimizer, params, [batch], jax.random.key(0))


@pytest.mark.quick("trace", "adam")
@pytest.mark.parametrize(
    ("optimizer", "wrong"),
    [
        pytest.param(optax.sgd(0.5, momentum=0.9), optax.sgd(0.5, momentum=0.8), id="trace"),
        pytest.param(lenient(optax.adam(0.1)), lenient(optax.adam(0.1, b2=0.99)), id="adam"),
    ],
)
def test_a_moment_that_is_zero_in_the_first_state(optimizer, wrong):
    """Catches a law that compares the first step alone, which multiplies the decay of a moment by zero."""
    program = make_program(optimizer)
    assert compiled(program, None) is None
    vars(program)["compiled"] = make_program(wrong).compiled
    with pytest.raises(AssertionError, match="is not the reference's for all inputs"):
        compiled(program, None)
