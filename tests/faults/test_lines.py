"""Kernels of the field with a planted fault each: the right ones are proved, the wrong ones' lines are named."""

import pytest

from faults import lines

# What a run of `python tests/faults/lines.py` found: from these on it has become worse.
FEWEST = {"development": 36, "held_out": 32, "fresh": 17, "unseen": 19, "third": 18, "fourth": 14}
FEWEST |= {"fifth": 28, "sixth": 12, "seventh": 25, "eighth": 22, "ninth": 26, "tenth": 20}
HALVES = {
    "development": lines.DEVELOPMENT,
    "held_out": lines.HELD_OUT,
    "fresh": lines.FRESH,
    "unseen": lines.UNSEEN,
    "third": lines.THIRD,
    "fourth": lines.FOURTH,
    "fifth": lines.FIFTH,
    "sixth": lines.SIXTH,
    "seventh": lines.SEVENTH,
    "eighth": lines.EIGHTH,
    "ninth": lines.NINTH,
    "tenth": lines.TENTH,
}
# One of a kind each: a collective over another axis, a local count, a mask, an offset, a permutation, a term.
QUICK = ("sinkhorn", "k_means", "window", "embedding_offset", "next_token", "mlp_bias")
# And another axis, a stale variable, the root of another dim, the first device for the last, rows of one device for all
# rows, a place without the index of the device, a factor that nothing reads, an order in each round of a loop.
QUICK += ("layered_product", "sharpness", "latent", "upsampled", "discrepancy", "dropped", "sampled", "stencil")
# And a transposed operand, a mask without another one, what nothing reads before a collective and behind a function, a
# stale array beside one that travels, a right value that is read for another one.
QUICK += ("pencils_again", "supervised_again", "gated_cell", "forgetting", "pressed_again", "quasi_newton")


@pytest.mark.parametrize("name", QUICK)
def test_the_line_is_named(name):
    lines.prove(lines.BY_NAME[name], lines.BY_NAME[name].right)
    outcome = lines.verdict(lines.BY_NAME[name])
    assert outcome.names == "line", outcome.message


@pytest.mark.deep
@pytest.mark.parametrize("name", sorted(set(lines.BY_NAME) - set(QUICK)))
def test_the_right_kernel_is_proved_and_the_wrong_one_refuted(name):
    lines.prove(lines.BY_NAME[name], lines.BY_NAME[name].right)
    assert lines.verdict(lines.BY_NAME[name]).names != "proved"


@pytest.mark.deep
@pytest.mark.parametrize("half", FEWEST)
def test_so_many_lines_are_named(half):
    verdicts = [lines.verdict(lines.BY_NAME[name]) for name in HALVES[half]]
    assert sum(outcome.names == "line" for outcome in verdicts) >= FEWEST[half]
    assert not any("equality.py" in outcome.message for outcome in verdicts)
