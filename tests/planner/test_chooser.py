"""Which mesh the planner chooses, and that the figures which it prints are why."""

from itertools import pairwise

import pytest

from shardkit import planner
from shardkit.planner.search import Layout, Model

pytestmark = pytest.mark.check
SMALL = Model(layers=4, hidden=1024, heads=16, vocabulary=32000)
LLAMA_8B = Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)
COLUMNS = ["state GB", "activations GB", "compute ms", "hidden ms", "exposed ms", "step ms"]


def best(found, tensor):
    """The fastest candidate with that many tensor ways, if any."""
    return next((each for each in found if each.layout.tensor == tensor), None)


def search(model, **machine):
    axes = ("data", "fsdp", "tensor")
    found = planner.search(model, axes=axes, **{"chip": "h100", "chips": 8} | machine)
    text = planner.table(found[:1])
    assert all(column in text.splitlines()[0] for column in COLUMNS)
    return found


# proves S29: batch against model ways, by the size of model, activations, batch and communication
def test_a_batch_is_split_before_the_model_unless_it_is_smaller_than_the_devices():
    found = search(SMALL, batch=64, sequence=2048)
    assert found[0].layout.tensor == 1
    split = [best(found, ways) for ways in (1, 2, 4, 8)]
    assert all(a.exposed_seconds < b.exposed_seconds for a, b in pairwise(split))  # what tensor ways send
    assert all(a.seconds < b.seconds for a, b in pairwise(split))
    # proves S29
    found = search(SMALL, batch=2, sequence=2048)
    assert {each.layout.tensor for each in found} == {4, 8} and found[0].layout.tensor == 4


# proves S29
def test_a_model_is_split_whose_state_or_activations_fit_nowhere_whole():
    whole = planner.estimate(LLAMA_8B, Layout(data=8), chip="h100", batch=64, sequence=2048)
    assert whole.state_bytes > whole.usable_bytes and not whole.fits
    assert all(each.layout.fsdp * each.layout.tensor > 1 for each in search(LLAMA_8B, batch=64, sequence=2048))
    # proves S29: with one long sequence a device, the scores of attention do not fit without tensor ways
    layout = Layout(fsdp=8, remat="full")
    alone = planner.estimate(LLAMA_8B, layout, chip="h100", batch=8, sequence=16384)
    assert alone.state_bytes < alone.usable_bytes < alone.bytes and alone.activation_bytes > alone.state_bytes
    found = search(LLAMA_8B, batch=8, sequence=16384)
    assert best(found, 1) is None and found[0].layout.tensor > 1
