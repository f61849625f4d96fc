"""Loss curves: each run's own points, and its difference from the first where both have a step."""

import math

import jax
import numpy as np
import pytest

from shardkit import viz
from support.refusals import refused

pytestmark = pytest.mark.check


def lines(axes):
    return {line.get_gid(): line.get_xydata().tolist() for line in axes.lines if line.get_gid()}


def test_curves_and_their_differences():
    """It alone finds a difference of other steps, or with the sign turned."""
    runs = {"one": [3.0, 2.0, 1.0], "fsdp": {3: 1.25, 1: 2.5}, "other steps": {10: 1.0}}
    above, below = viz.losses(runs).axes
    assert lines(above) == {
        "one": [[1, 3.0], [2, 2.0], [3, 1.0]],
        "fsdp": [[1, 2.5], [3, 1.25]],
        "other steps": [[10, 1.0]],
    }
    assert lines(below) == {"fsdp - one": [[1, -0.5], [3, 0.25]]}
    assert (above.get_ylabel(), below.get_ylabel(), below.get_xlabel()) == ("loss", "difference", "step")
    assert viz.losses(runs).texts[1].get_text() == "largest difference: 0.5 (fsdp - one)"


def test_marks_are_on_the_last_curve():
    """It alone finds a mark at a step without a loss, which would be on no curve, or on another run's."""
    picture = viz.losses({"one": [9.0, 8.0], "two": {1: 3.0, 5: 2.0}}, marks={"a fault": [5, 4, 0], "none": []})
    above = lines(picture.axes[0])
    assert above["a fault"] == [[5, 2.0], [1, 3.0], [1, 3.0]] and above["none"] == []
    assert [text.get_text() for text in picture.legends[0].get_texts()] == ["one", "two", "a fault", "none"]


def test_equal_curves_say_so_and_stay_visible_and_one_run_has_no_differences():
    picture = viz.losses({"one": [3.0, 2.0], "same": [3.0, 2.0]})
    assert picture.texts[1].get_text() == "no difference from one at any step"
    first, second = (line for line in picture.axes[0].lines if line.get_gid())
    assert first.get_linewidth() > second.get_linewidth() and first.get_linestyle() != second.get_linestyle()
    [axes] = viz.losses({"one": [3.0, math.nan, 2.0]}).axes
    assert len(lines(axes)["one"]) == 3


@pytest.mark.parametrize("kind", [np.array, jax.device_put, list, lambda x: [jax.device_put(each) for each in x]])
def test_losses_of_numpy_and_jax(kind):
    run = kind(np.array([2.0, 1.0], np.float32))
    assert lines(viz.losses({"a": run}).axes[0])["a"] == [[1.0, 2.0], [2.0, 1.0]]


@pytest.mark.parametrize("wrong", ["high", None, True, 3j])
def test_what_is_no_loss_is_refused(wrong):
    for run in ([wrong], {1: wrong}, wrong):
        assert refused(lambda: viz.losses({"a": run}), TypeError) == (
            f"viz.losses: the losses of 'a' must be numbers, in a sequence or by step; got {wrong!r}. Pass for example "
            "{'fsdp': [2.0, 1.5]}."
        )


@pytest.mark.parametrize("none", [{}, {"a": []}, {"a": {}}])
def test_no_losses_are_refused(none):
    assert refused(lambda: viz.losses(none)) == (
        "viz.losses: losses must have at least one loss; got none. Pass for example {'fsdp': [2.0]}."
    )
