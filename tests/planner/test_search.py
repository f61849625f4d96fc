"""The planner: its ranking against brute force, the mesh that it chooses, and advice that fits by the same formulas."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit import cost, planner
from shardkit.planner import Layout, Model
from shardkit.planner.search import list_layouts
from support.refusals import type_error, value_error

pytestmark = pytest.mark.check

SMALL = Model(layers=4, hidden=1024, heads=16, vocabulary=32000)
LLAMA_8B = Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)


def brute_force(model, chip, chips, batch, sequence):
    """Every combination of sizes up to the chips and of microbatches, refused or estimated one by one."""
    found, powers = [], [2**i for i in range(chips.bit_length())]
    for data, fsdp, tensor, context, stage in itertools.product(powers, repeat=5):
        many = [(1, 1)] if stage == 1 else itertools.product((1, 2, 3, 4), range(stage, min(batch, 8 * stage) + 1))
        for (chunks, microbatches), remat in itertools.product(many, ("none", "selective", "full")):
            for accumulate in range(1, batch + 1) if data * fsdp * tensor * context * stage == chips else ():
                ways = {"context": context, "stage": stage, "chunks": chunks, "microbatches": microbatches}
                layout = Layout(data, fsdp, tensor, accumulate, remat, **ways)
                if stage > 1 and accumulate > 1:  # the schedule has all microbatches of the step
                    continue
                try:
                    candidate = planner.estimate(model, layout, chip=chip, batch=batch, sequence=sequence)
                except ValueError:
                    continue
                if candidate.fits:
                    found.append(candidate)
    return found


# proves N34, F85 in part: the search is exhaustive over all axes but experts
@settings(max_examples=10, deadline=None)
@given(
    chip=st.sampled_from(["v5e", "v5p", "h100"]),
    chips=st.sampled_from([1, 2, 8, 16, 32]),
    batch=st.sampled_from([12, 24]),
    sequence=st.sampled_from([512, 8192]),
    layers=st.sampled_from([4, 96]),
)
def test_the_ranking_is_the_brute_force_optimum(chip, chips, batch, sequence, layers):
    model = SMALL._replace(layers=layers)
    found = planner.search(model, chip=chip, chips=chips, batch=batch, sequence=sequence)
    every = brute_force(model, chip, chips, batch, sequence)
    assert sorted(found) == sorted(every)
    assert [c.seconds for c in found] == sorted(c.seconds for c in every)
    assert all(c.layout.chips == chips and c.bytes <= c.usable_bytes for c in found)


def test_layouts_respect_the_model_and_the_host_and_sizes_may_be_numpys():
    machine = {"chip": "v5p", "chips": 8, "batch": 8, "sequence": 512}
    found = planner.search(
        SMALL, **machine | {name: np.int32(machine[name]) for name in ("chips", "batch", "sequence")}
    )
    assert found == planner.search(SMALL, **machine)
    assert {type(size) for c in found for size in c.layout} == {int, str, bool}
    for layout in list_layouts(LLAMA_8B, chip="h100", chips=64, batch=64, sequence=4096):
        assert layout.tensor in (1, 2, 4, 8) and layout.chips == 64
    widest = max(layout.tensor for layout in list_layouts(LLAMA_8B, chip="v5p", chips=64, batch=64, sequence=4096))
    assert widest == 8  # eight key/value heads


def fits(model, candidate, **machine):
    again = planner.estimate(model, candidate.layout, **machine)
    return again == candidate and again.bytes <= 0.9 * cost.chip(machine["chip"]).hbm_bytes


# proves S118
def test_advice_when_memory_runs_out():
    machine = {"chip": "v5p", "batch": 64, "sequence": 4096}
    given = Layout(data=4, fsdp=4, remat="selective")
    advice = planner.advise(LLAMA_8B, given, **machine)
    assert not advice.given.fits and advice.given.layout == given
    proposals = dict(advice.proposals)
    assert {"fsdp", "context", "tensor", "accumulate", "remat"} == set(proposals)
    for name, candidate in proposals.items():
        layout = candidate.layout
        assert layout.chips == 16 and fits(LLAMA_8B, candidate, **machine), name
    assert proposals["fsdp"].layout.fsdp > 4 and proposals["fsdp"].layout.remat == "selective"
    assert proposals["tensor"].layout.tensor > 1 and proposals["tensor"].layout.remat == "selective"
    assert proposals["accumulate"].layout == given._replace(accumulate=proposals["accumulate"].layout.accumulate)
    assert proposals["remat"].layout == given._replace(remat="full")
    text = str(advice)
    assert text.startswith(
        f"data=4 fsdp=4 tensor=1 accumulate=1 remat=selective does not fit: "
        f"{advice.given.bytes / 1e9:.2f} GB of 91.80 GB usable\n"
    )
    for name, candidate in proposals.items():
        row = next(line for line in text.splitlines() if line.split()[0] == name)
        assert f"{candidate.state_bytes / 1e9:.2f}" in row and f"{candidate.activation_bytes / 1e9:.2f}" in row


def test_advice_combines_changes_and_takes_more_chips_only_where_one_is_not_enough():
    machine = {"chip": "v5e", "batch": 256, "sequence": 4096}
    advice = planner.advise(LLAMA_8B, Layout(data=64), **machine)
    ((name, candidate),) = advice.proposals
    assert name == "together" and fits(LLAMA_8B, candidate, **machine)
    assert candidate == planner.search(LLAMA_8B, chips=64, **machine)[0]
    assert advice.batch == 0 and advice.batch_candidate is None
    machine = {"chip": "v5e", "batch": 4, "sequence": 4096}
    assert planner.search(LLAMA_8B, chips=4, **machine) == []
    ((name, candidate),) = planner.advise(LLAMA_8B, Layout(fsdp=4), **machine).proposals
    assert name == "chips" and fits(LLAMA_8B, candidate, **machine)
    assert candidate.layout.chips > 4 and planner.search(LLAMA_8B, chips=candidate.layout.chips // 2, **machine) == []


def test_advice_says_when_nothing_helps_and_when_nothing_is_needed():
    advice = planner.advise(LLAMA_8B, Layout(), chip="v5e", batch=1, sequence=2**22)
    assert advice.proposals == ()
    assert str(advice).endswith("on any number of chips that divides it: shorten the sequence")
    advice = planner.advise(SMALL, Layout(fsdp=4), chip="v5p", batch=8, sequence=512)
    assert advice.given.fits and advice.proposals == ()
    assert " fits: " in str(advice).splitlines()[0]


# proves S120
@settings(max_examples=40, deadline=None)
@given(
    fsdp=st.sampled_from([1, 4, 16]),
    tensor=st.sampled_from([1, 4]),
    accumulate=st.integers(1, 3),
    remat=st.sampled_from(["none", "selective", "full"]),
    chip=st.sampled_from(["v5e", "h100"]),
)
def test_the_advised_batch_is_the_largest_for_its_target(fsdp, tensor, accumulate, remat, chip):
    layout = Layout(data=2, fsdp=fsdp, tensor=tensor, accumulate=accumulate, remat=remat)
    step = 2 * fsdp * accumulate
    advice = planner.advise(SMALL, layout, chip=chip, batch=step, sequence=2048)
    most = advice.batch
    assert most % step == 0

    def filled(batch):
        return planner.estimate(SMALL, layout, chip=chip, batch=batch, sequence=2048).bytes / cost.chip(chip).hbm_bytes

    assert filled(most + step) > 0.8
    if most:
        assert filled(most) <= 0.8
        assert advice.batch_candidate.bytes <= advice.batch_candidate.usable_bytes
        assert f"batch {most} fills " in str(advice)


def test_table():
    machine = {"chip": "v5p", "chips": 64, "batch": 256, "sequence": 4096}
    found = planner.search(LLAMA_8B, axes=("data", "fsdp", "tensor"), **machine)
    lines = planner.table(found[:3]).splitlines()
    assert len(lines) == 4 and len({len(line) for line in lines}) == 1
    assert re.split(r"  +", lines[0].strip()) == [
        "data", "fsdp", "tensor", "accumulate", "remat", "state GB", "activations GB", "compute ms", "hidden ms",
        "exposed ms", "step ms", "MFU %",
    ]  # fmt: skip
    figures = (found[0].state_bytes / 1e9, found[0].activation_bytes / 1e9, 1e3 * found[0].compute_seconds)
    assert lines[1].split()[:7] == [*map(str, found[0].layout[:5]), *(f"{each:.2f}" for each in figures[:2])]
    assert lines[1].split()[7] == f"{figures[2]:.1f}" and lines[1].split()[11] == f"{100 * found[0].mfu:.1f}"


REFUSED = {
    "planner: data must be a whole number of at least 1; got 0. Pass data=1 or more.": (Layout(data=0), {}),
    "planner: batch must be a whole number of at least 1; got None. Pass batch=1 or more.": (Layout(), {"batch": None}),
    "planner: efficiency must be above 0 and at most 1; got 0. Pass efficiency=1.": (Layout(), {"efficiency": 0}),
    "planner: remat must be 'none', 'selective' or 'full'; got 'some'. Pass for example remat='none'.": (
        Layout(remat="some"), {},
    ),
    "planner: batch must be divisible by data * fsdp * expert * accumulate * microbatches; got 8 over 12. Change the "
    "batch or the layout.": (Layout(data=2, fsdp=2, accumulate=3), {}),
    "planner: tensor must divide heads, kv_heads and ffn, and a GPU host's chips; got 3 for 16 heads, 16 kv_heads, ffn "
    "4096 and chip 'v5p'. Choose fewer tensor ways.": (Layout(tensor=3), {}),
    "planner: stage * chunks must divide the layers; got 3 * 1 for 4 layers. Choose fewer stages or chunks.": (
        Layout(stage=3), {},
    ),
    "planner: chunks and microbatches must be 1 without stages; got chunks=1, microbatches=2. Pass stages, or "
    "accumulate=2.": (Layout(microbatches=2), {}),
    "planner: a sequence must be divisible by tensor ways and by 2 * context; got 512 tokens over 6 parts. Choose "
    "another sequence or fewer ways.": (Layout(context=3), {}),
    "planner: expert must divide the experts; got 2 for 0 experts. Choose fewer ways.": (Layout(expert=2), {}),
}  # fmt: skip


@pytest.mark.parametrize(("message", "asked"), REFUSED.items())
def test_errors(message, asked):
    layout, options = asked
    for ask in (planner.estimate, planner.advise):
        with value_error(message):
            ask(SMALL, layout, **{"chip": "v5p", "batch": 8, "sequence": 512} | options)


# 2.5 layers were not divisible by one stage, and four in quotes were a raw error of string formatting.
@pytest.mark.parametrize("layers", [2.5, "4"])
def test_sizes_of_a_model_are_whole_numbers(layers):
    model = SMALL._replace(layers=layers)
    for ask in (planner.search, planner.estimate):
        subject = {"chips": 8} if ask is planner.search else {"layout": Layout()}
        with pytest.raises((TypeError, ValueError), match=r"^planner: layers must be a whole number"):
            ask(model, **subject, chip="v5p", batch=8, sequence=512)


def test_errors_of_a_search_and_of_the_rest():
    with value_error(
        "planner: a layout must divide the chips, the model and the batch, and none does; got 7 chips, 16 heads and "
        "batch 8. Choose a batch that has more divisors in common with the chips."
    ):
        planner.search(SMALL, chip="v5p", chips=7, batch=8, sequence=512)
    with type_error(
        "planner: layout must be a Layout; got (1, 8, 1). Pass for example planner.Layout(fsdp=8, tensor=2)."
    ):
        planner.estimate(SMALL, (1, 8, 1), chip="v5p", batch=8, sequence=512)
    with value_error("planner: names must be one per candidate; got 1 for 2. Pass one for each, or none."):
        planner.table(planner.search(SMALL, chip="v5p", chips=8, batch=8, sequence=512)[:2], names=["first"])


# Catches a row that sends for longer than an equally fast one of its kind, and one that is slower but sends less.
def test_of_equally_fast_layouts_of_a_kind_the_one_that_sends_less_is_shown():
    (first,) = planner.search(SMALL, chip="v5e", chips=8, batch=8, sequence=512, axes=("fsdp",))[:1]
    first = first._replace(compute_seconds=1.0, hidden_seconds=0.0, exposed_seconds=0.0, by_axis=(("fsdp", 0.3),))
    near = first._replace(compute_seconds=1.009, by_axis=(("fsdp", 0.1), ("data", 0.1)))
    slower = first._replace(compute_seconds=1.011, by_axis=(("fsdp", 0.1),))
    assert planner.kinds([slower, first, near]) == [near]


def best(found, tensor):
    """The fastest candidate with that many tensor ways, if any."""
    return next((each for each in found if each.layout.tensor == tensor), None)


def search(model, **machine):
    return planner.search(model, axes=("data", "fsdp", "tensor"), chip="h100", chips=8, **machine)


# proves S29: batch against model ways, by the size of model, activations, batch and communication
def test_a_batch_is_split_before_the_model_unless_it_is_smaller_than_the_devices():
    found = search(SMALL, batch=64, sequence=2048)
    assert found[0].layout.tensor == 1
    split = [best(found, ways) for ways in (1, 2, 4, 8)]
    assert all(a.exposed_seconds < b.exposed_seconds for a, b in itertools.pairwise(split))  # what tensor ways send
    assert all(a.seconds < b.seconds for a, b in itertools.pairwise(split))
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
