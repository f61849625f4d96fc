"""The memory and the step time of a transformer's layout, by arithmetic; `aot.compile` lets the compiler decide.

- Memory per device: that of the worst moment of a step, by the list of buffers in `memory.py`.
- Time per step: that of the operations in `operations.py`, whose matmuls reach `efficiency` of the chip's peak, and of
  what is sent, by `traffic.py`, over the links of `cost/links.py`, as far as `overlap.py` says that it is exposed.
- What a stage sends to the next is exposed.
- A pipeline saves the stage's input of every microbatch in flight and recomputes all else, so that a microbatch costs a
  forward more, and computes at each tick what any stage does (`mode="masked"`).
- Latency counts where links were measured; published ones have none, so that times are lower bounds, as those of `aot`.

The figures rank layouts. What a compiler makes of a step is its own affair, except for the few rows of `habits.py`.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from shardkit import cost
from shardkit._arguments import checks
from shardkit.layers.attention_kernel import find_wrong_head
from shardkit.planner.candidates import Candidate
from shardkit.planner.layout import IMPLS, REMAT, Layout
from shardkit.planner.machine import Machine
from shardkit.planner.memory import find_peak
from shardkit.planner.model import Model, check_sizes
from shardkit.planner.operations import time_operations
from shardkit.planner.overlap import hide_traffic, time_traffic
from shardkit.planner.pipelined import run_pipeline
from shardkit.planner.share import find_misfit, find_share
from shardkit.planner.traffic import count_stage_input

_MOST = 10**9


def estimate(
    model: Model,
    layout: Layout,
    *,
    chip: str | cost.Chip,
    batch: int,
    sequence: int,
    memory_share: float = 0.9,
    efficiency: float = 1.0,
    links: cost.Links | None = None,
) -> Candidate:
    """Estimates the memory and the step time of one layout.

    Args:
        model: the sizes.
        layout: the layout.
        chip: a chip or its name.
        batch: sequences per step, over all devices.
        sequence: tokens per sequence.
        memory_share: usable share of the chip's memory; the compiler and the allocator need the rest.
        efficiency: share of the peak reached by matmuls.
        links: measured links (`bench.links`), with the axes of `Layout` by name; None: the published links of the chip.

    Returns:
        Candidate, in bytes and seconds.

    Raises:
        TypeError: a model other than a Model, or a layout other than a Layout.
        ValueError: a size below 1, a batch that does not divide over the layout, tensor ways that do not divide the
            model or cross GPU hosts, an unknown chip or remat, or a share outside 0 to 1.

    Example:
        >>> model = sk.planner.Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)
        >>> found = sk.planner.estimate(model, sk.planner.Layout(fsdp=64), chip="v5p", batch=64, sequence=2048)
        >>> f"{found.bytes / 1e9:.1f} GB, {found.seconds:.2f} s, MFU {found.mfu:.0%}"
        '19.1 GB, 0.44 s, MFU 49%'
    """
    machine = Machine(cost.chip(chip), memory_share, efficiency, links)
    layout, batch, sequence = check_job(model, layout, machine, batch, sequence)
    return estimate_checked(model, layout, machine, batch, sequence)


def estimate_checked(model: Model, layout: Layout, machine: Machine, batch: int, sequence: int) -> Candidate:
    """`estimate` of a layout that was checked."""
    share = find_share(model, layout, batch, sequence)
    peak = find_peak(share, machine.chip)
    activations = peak.activations
    compute = time_operations(share, machine)
    seconds = time_traffic(share, machine)
    hidden = hide_traffic(share, machine, seconds, compute)
    exposed = sum(seconds.values()) - seconds["stage"] - hidden
    bubble = 0.0
    if layout.stage > 1:
        run = run_pipeline(layout)
        # While one stage waits for its collectives all wait, in the idle ticks too; sends to the next stage are at the
        # end of a tick, where nothing is left to compute.
        bubble = run.bubble
        activations += run.inputs * count_stage_input(share)
        compute *= 1 + bubble
        exposed = exposed * (1 + bubble) + seconds["stage"]
    candidate = Candidate(
        model=model,
        layout=layout,
        state_bytes=peak.state,
        activation_bytes=activations,
        usable_bytes=machine.usable_bytes,
        compute_seconds=compute,
        hidden_seconds=hidden,
        exposed_seconds=exposed,
        mfu=0.0,
        by_axis=tuple((axis, time) for axis, time in seconds.items() if time),
        bubble=bubble,
    )
    # Forward, and backward twice as much. What is recomputed is no FLOP of the model.
    flops = float(batch * sequence * 3 * _count_model_flops(model, sequence))
    mfu = cost.mfu(flops, candidate.seconds, peak=machine.chip, chips=layout.chips)
    return candidate._replace(mfu=mfu)


def _count_model_flops(model: Model, sequence: int) -> float:
    """FLOPs of the model for a token, forward: of all scores, or for the kernel of the half that it computes.

    Papers count all of them. A kernel that leaves out what is masked would exceed the peak of its chip by that count:
    at 131,072 tokens most FLOPs of a model are those of attention.
    """
    flops = model.flops(sequence)
    if not model.kernel:
        return flops
    scores = flops - model.flops(0)
    return flops - scores / 2


def check_job(model: Model, layout: Layout, machine: Machine, batch: int, sequence: int) -> tuple[Layout, int, int]:
    """The layout, batch and sequence as Python integers; refuses a layout that does not divide batch or model."""
    _check_kinds(model, layout)
    check_sizes(model)
    names = [name for name in layout._fields if name not in ("remat", "impl", "prefetch")]
    sizes = {name: getattr(layout, name) for name in names}
    *ways, batch, sequence = checks.integers_from_one("planner", **sizes, batch=batch, sequence=sequence)
    checked: dict[str, Any] = dict(zip(names, ways, strict=True))
    layout = layout._replace(**checked)
    check_at_most_a_billion(batch=batch, sequence=sequence)
    checks.one_of("planner", "remat", layout.remat, REMAT)
    _check_form(layout)
    check_machine(machine)
    check_kernel(model, machine)
    if batch % layout.parts:
        raise ValueError(
            f"planner: batch must be divisible by data * fsdp * expert * accumulate * microbatches; got {batch} over "
            f"{layout.parts}. Change the batch or the layout."
        )
    if not tensor_divides(model, machine.chip, layout.tensor):
        raise ValueError(
            f"planner: tensor must divide heads, kv_heads and ffn, and a GPU host's chips; got {layout.tensor} for "
            f"{model.heads} heads, {model.key_heads} kv_heads, ffn {model.width} and chip {machine.chip.name!r}. "
            "Choose fewer tensor ways."
        )
    reason = find_misfit(model, layout, sequence)
    if reason:
        raise ValueError(f"planner: {reason}")
    return layout, batch, sequence


def _check_kinds(model: object, layout: object) -> None:
    if not isinstance(model, Model):
        raise TypeError(
            f"planner: model must be a Model; got {model!r}. Pass for example planner.Model(layers=8, hidden=64, "
            "heads=4, vocabulary=256)."
        )
    if not isinstance(layout, Layout):
        raise TypeError(
            f"planner: layout must be a Layout; got {layout!r}. Pass for example planner.Layout(fsdp=8, tensor=2)."
        )


def _check_form(layout: Layout) -> None:
    """Refuses a form of the step that the layout has no use for."""
    checks.one_of("planner", "impl", layout.impl, IMPLS)
    if layout.impl != "auto" and layout.tensor == 1:
        raise ValueError(
            f"planner: impl is a form of matmuls over tensor ways; got {layout.impl!r} and tensor=1. Leave it out."
        )
    if not isinstance(layout.prefetch, bool):
        raise TypeError(f"planner: prefetch must be a bool; got {layout.prefetch!r}. Pass prefetch=True.")
    if layout.prefetch and (layout.fsdp == 1 or layout.stage > 1):
        raise ValueError(
            "planner: prefetch gathers the layers of fsdp ways in a loop over all layers, which a pipeline has not; "
            f"got fsdp={layout.fsdp} and stage={layout.stage}. Leave it out."
        )


def check_kernel(model: Model, machine: Machine) -> None:
    """Refuses heads that the kernel of attention does not take on the chip."""
    if not model.kernel:
        return
    wrong = find_wrong_head(machine.platform, model.head)
    if wrong:
        raise ValueError(f"planner: {wrong} and chip {machine.chip.name!r}. Choose kernel=False.")


def tensor_divides(model: Model, chip: cost.Chip, tensor: int) -> bool:
    """Whether that many tensor-parallel ways divide the model, and fit into a GPU host."""
    if not chip.torus and chip.host % tensor:
        return False
    return math.gcd(model.heads, model.key_heads, model.width) % tensor == 0


def check_machine(machine: Machine) -> None:
    """Refuses what are no shares, and no links."""
    shares = {"memory_share": machine.memory_share, "efficiency": machine.efficiency}
    for name, value in shares.items():
        is_share = isinstance(value, Real) and not isinstance(value, bool) and 0 < value <= 1
        if not is_share:
            raise ValueError(f"planner: {name} must be above 0 and at most 1; got {value!r}. Pass {name}=1.")
    links: object = machine.links
    if links is not None and not isinstance(links, cost.Links):
        raise TypeError(
            f"planner: links must be a cost.Links; got {links!r}. Pass for example shardkit.bench.links(records)."
        )


def check_at_most_a_billion(**numbers: int) -> None:
    """Refuses so many chips, or examples in a step, that the search would try divisors for minutes."""
    for name, number in numbers.items():
        if number > _MOST:
            raise ValueError(f"planner: {name} must be at most {_MOST:,}; got {number:.3g}. Lower it.")
