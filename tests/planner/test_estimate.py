"""The planner's estimates: by hand, and against the state of a real train step."""

import math
from fractions import Fraction

import jax
import pytest

from benchmarks import large_model
from shardkit import cost, planner
from shardkit.analysis.hlo.compute import clock_of
from shardkit.planner import Layout, Model
from support.refusals import type_error

pytestmark = pytest.mark.check

SMALL = Model(layers=4, hidden=1024, heads=16, vocabulary=32000)


# proves F52 (the estimate)
def test_memory_by_hand():
    # 8 devices, 4 fsdp x 2 tensor, 2 sequences each
    def found(remat="none", **changes):
        layout = Layout(fsdp=4, tensor=2, remat=remat)
        return planner.estimate(SMALL._replace(**changes), layout, chip="v5p", batch=8, sequence=512)

    matrices, table, tokens = (4 + 3 * 4) * 1024**2 / 2, 32000 * 1024 / 2, 2 * 512
    layers, gains = 4 * matrices / 4, 9 * 1024
    held = 12 * (layers + 2 * table / 4 + gains / 4) + 8 * tokens
    casts, stacks, scores, wide = 2 * layers, 4 * layers, tokens * 512 * 8, tokens * 2048
    stream = heads = tokens * 512
    saved = 2 * (2 * stream + 2 * heads + 2 * heads + 2 * wide + scores)
    logits = tokens * 16000
    state = held + casts + stacks + 2 * matrices + 4 * matrices / 3  # a layer gathered, and a gradient before its scatter
    assert found().state_bytes == pytest.approx(state)
    assert found().activation_bytes == pytest.approx(4 * saved + 2 * logits + max(6 * wide, 2 * scores))
    full = 4 * 2 * stream + 2 * logits + (saved - 2 * stream) + 4 * scores
    assert found("full").activation_bytes == pytest.approx(full) and found("full").state_bytes == found().state_bytes
    selective = saved - 2 * scores - 2 * heads
    assert found("selective").activation_bytes == pytest.approx(
        4 * selective + 2 * logits + 2 * scores + 2 * heads + 4 * scores
    )
    assert found().usable_bytes == 0.9 * 95 * 2**30 and found().fits
    # with a large vocabulary the head is the worst moment: its weights, the logits and their gradient
    large = found("full", vocabulary=2**19)
    table, logits = 2**19 * 512, tokens * 2**18
    assert large.bytes > 6 * logits and large.activation_bytes in (
        pytest.approx(4 * 2 * stream + 6 * logits),
        pytest.approx(2 * logits),
    )


# proves F84 (a step's roofline)
def test_time_by_hand():
    layout = Layout(data=2, fsdp=2, tensor=2, accumulate=2)
    job = {"chip": "v5p", "batch": 8, "sequence": 512}
    chip, found = cost.chips["v5p"], planner.estimate(SMALL, layout, **job)
    # a side of the cube of 8 chips has 2: each kind of ways extends along one dimension
    matrices, tables, gains = 4 * 16 * 1024**2 / 2, 2 * 32000 * 1024 / 2, 9 * 1024
    fsdp = (2 * (2 * 2 + 4) * (matrices + 8 * 1024) + (2 + 4) * (tables + 1024)) / 2
    data = 4 * (matrices + tables) / 2 + 2 * 3 / 4 * 4 * gains / 2 + 2 * 3 / 4 * 16
    assert found.hidden_seconds == pytest.approx((fsdp + data) / (2 * chip.link_bandwidth))
    # microbatches of one sequence: embedding and head exchange four times, a layer ten times; and the loss's sums
    exposed = 2 * (2 * 512 * 1024 * (4 + 4 * 10) + 2 * 16 * 512) / 2
    assert found.exposed_seconds == pytest.approx(exposed / (2 * chip.link_bandwidth))
    assert found.seconds == max(found.compute_seconds, found.hidden_seconds) + found.exposed_seconds
    flops = cost.transformer_flops(layers=4, hidden=1024, sequence=512, batch=8, vocabulary=32000, gated=True)
    assert found.mfu == pytest.approx(flops / 8 / chip.flops / found.seconds)
    full = planner.estimate(SMALL, layout._replace(remat="full"), **job)
    assert full.exposed_seconds > found.exposed_seconds and full.mfu < found.mfu
    # with infinite memory bandwidth, the matmuls alone
    fast = chip._replace(hbm_bandwidth=1e30)
    alone = planner.estimate(SMALL, layout, **job | {"chip": fast})
    assert alone.compute_seconds == pytest.approx(flops / 8 / chip.flops) < found.compute_seconds
    half = planner.estimate(SMALL, layout, **job | {"chip": fast}, efficiency=0.5)
    assert half.compute_seconds == pytest.approx(2 * alone.compute_seconds)


def test_groups_that_leave_a_gpu_host_are_bound_by_its_network():
    def seconds_of(name, **ways):
        chip = cost.chips["h100"]._replace(**{name: 1.0})
        return planner.estimate(SMALL, Layout(**ways), chip=chip, batch=64, sequence=512).hidden_seconds

    def sent(fsdp, data=1):
        return work.sent(SMALL, Layout(data, fsdp), 64 // (fsdp * data), 512)

    assert seconds_of("link_bandwidth", fsdp=8) == pytest.approx(sent(8)["fsdp"] + sent(8)["data"])
    # eight members a host send by eight adapters; with 8 copies a host, each group has one member there
    assert seconds_of("network_bandwidth", fsdp=16) == pytest.approx((sent(16)["fsdp"] + sent(16)["data"] * 8) / 8, 1e-6)
    assert seconds_of("network_bandwidth", fsdp=8, data=2) == pytest.approx(sent(8, 2)["data"])


def test_the_wire_of_a_gpu_group_is_its_hosts_or_the_network():
    """Places are (slice, host, GPU): another host of the same slice is behind the network, too."""
    chip = cost.chip("h100")
    clock = clock_of("cuda", chip, [(0, host, gpu) for host in range(2) for gpu in range(2)])
    inside, across = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    assert clock.compute(10**15, 1) == 1e15 / chip.flops and clock.compute(1, 10**12) == 1e12 / chip.hbm_bandwidth
    assert clock.wire("all_gather", inside, Fraction(10**9)) == 1e9 / chip.link_bandwidth
    assert clock.wire("all_gather", across, Fraction(10**9)) == 1e9 / chip.network_bandwidth
    # all members of a host send by their own adapters, in a permute each by its own
    assert clock.wire("all_gather", (), Fraction(10**9)) == 1e9 / (2 * chip.network_bandwidth)
    assert clock.wire("ppermute", across, Fraction(10**9)) == 1e9 / chip.network_bandwidth


def test_selective_recomputation_repeats_two_products():
    def compute(remat):
        layout = Layout(remat=remat)
        return planner.estimate(SMALL, layout, chip="v5p", batch=8, sequence=8192).compute_seconds * 459e12

    assert compute("selective") - compute("none") == pytest.approx(2 * 2 * 8 * 8192**2 * 1024 * 4)
    assert compute("none") < compute("selective") < compute("full")


def test_the_state_is_what_a_train_step_holds():
    config = large_model.MODELS["1.5b"]
    _, (state, _) = large_model.abstract(config, fsdp=4, tp=2, batch=1, tokens=4096)
    held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state))
    model = Model(layers=28, hidden=2048, heads=16, kv_heads=8, ffn=5632, vocabulary=32_768)
    assert model.parameters() == sum(x.size for x in jax.tree.leaves(state.params))
    found = planner.estimate(model, Layout(fsdp=4, tensor=2, remat="full"), chip="v5e", batch=4, sequence=4096)
    # the optimizer's 12 bytes a parameter are held between steps (norm gains whole), gradients and gathered weights not
    assert found.state_bytes > held == pytest.approx(12 * model.parameters() / 8, rel=1e-3)
    # the TPU compiler's own figure for this step is 4.12 GiB: attention that keeps its scores takes the rest
    assert 0.85 < found.bytes / (4.12 * 2**30) < 1


# ---- links as measured


def test_measured_links_replace_the_chips_and_their_messages_take_their_latency():
    model, layout = SMALL._replace(gated=False), Layout(data=2, fsdp=3, tensor=2, accumulate=2)
    own = {"data": cost.Link(1e-3, 1e9), "fsdp": cost.Link(2e-3, 2e9), "tensor": cost.Link(3e-3, 3e9)}
    links = cost.Links(cost.Link(9.0, 1.0), axes=tuple(own.items()))

    def found(layout=layout, **changes):
        return planner.estimate(model, layout, chip="v5p", batch=12, sequence=512, **changes)

    p, layers = model.parameters() / 2, 2 * 4  # microbatches x layers
    fsdp = 2 * (2 * p * 2 + p * 4) * 2 / 3 / 2e9 + 3 * layers * 2 * 2e-3
    data = 2 * p / 3 * 4 / 2 / 1e9 + 2 * 1e-3
    assert found(links=links).hidden_seconds == pytest.approx(fsdp + data)
    exchanged = layers * 4 * (2 * 1 / 2 * 512 * 1024 * 2)
    assert found(links=links).exposed_seconds == pytest.approx(exchanged / 3e9 + layers * 4 * 2 * 3e-3)
    full = found(layout._replace(remat="full"), links=links)
    assert full.exposed_seconds == pytest.approx(1.5 * found(links=links).exposed_seconds)
    assert found(links=links).compute_seconds == found().compute_seconds
    assert found().exposed_seconds < found(links=links).exposed_seconds


def test_slow_links_change_the_search_and_the_advice():
    """With a slow link between tensor-parallel devices, fsdp alone wins; as published, two tensor ways do."""
    job = {"chip": "v5e", "batch": 256, "sequence": 4096}
    model = Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)
    slow = cost.Links(cost.Link(1e-6, 45e9), axes=(("tensor", cost.Link(1e-4, 1e9)),))
    assert planner.search(model, chips=64, links=slow, **job)[0].layout.tensor == 1
    [(_, best), *_] = planner.advise(model, Layout(data=64), links=slow, **job).proposals
    assert (
        best == planner.estimate(model, best.layout, links=slow, **job) != planner.estimate(model, best.layout, **job)
    )


def test_links_that_are_none_are_refused():
    with type_error(
        "planner: links must be a cost.Links; got 'measured.jsonl'. Pass for example shardkit.bench.links(records)."
    ):
        planner.estimate(SMALL, Layout(data=8), chip="v5e", batch=8, sequence=512, links="measured.jsonl")
