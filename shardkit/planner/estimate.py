"""The memory and the step time of a transformer's layout, by arithmetic; `aot.compile` measures.

- Memory per device: that of the worst moment of a step, by the list of buffers in `memory.py`.
- Time per step: that of the operations in `work.py`, whose matmuls reach `efficiency` of the chip's peak, and of what
  is sent. FSDP's and data parallelism's collectives overlap with compute, tensor parallelism's do not: step =
  max(compute, fsdp + data) + tensor.
- Bandwidth, as for `aot` (`analysis/hlo/compute.py`): a torus group sends over the dimensions along which it extends
  in a square or cube of all chips. A GPU's tensor group is within a host; the others send at NVLink's speed within a
  host, and across hosts at the network's times the members per host, if that is less: each GPU has its own adapter.
  Latency is left out, so times are lower bounds.
- Stages, context and experts: the smaller problem of one device, and what they add, by `axes.py`.
- With `links`, as measured, each kind of ways has the bandwidth of its link instead, and every message its latency: a
  layer is gathered twice and scattered once per microbatch over fsdp, gradients are reduced once per step over data,
  and a layer exchanges over tensor as often as `work.exchanges_of` says.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

from shardkit import cost
from shardkit._arguments import checks
from shardkit.planner import memory, work
from shardkit.planner.axes import bandwidth, one_device, why_not, with_axes
from shardkit.planner.candidates import REMAT, Candidate, Layout, of_kind
from shardkit.planner.model import Model

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
    """The memory and the step time of one layout.

    Args:
        model: the sizes.
        layout: the layout.
        chip: a chip or its name.
        batch: sequences per step, over all devices.
        sequence: tokens per sequence.
        memory_share: usable share of the chip's memory; the compiler and the allocator need the rest.
        efficiency: share of the peak that matmuls reach.
        links: as measured (`bench.links`), of the axes of `Layout` by name; None: as published for the chip.

    Returns:
        Candidate, in bytes and seconds.

    Raises:
        TypeError: a model that is no Model, or a layout that is no Layout.
        ValueError: a size below 1, a batch that does not divide over the layout, tensor ways that do not divide the
            model or cross GPU hosts, an unknown chip or remat, or a share outside 0 to 1.

    Example:
        >>> model = sk.planner.Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)
        >>> found = sk.planner.estimate(model, sk.planner.Layout(fsdp=64), chip="v5p", batch=64, sequence=2048)
        >>> f"{found.bytes / 1e9:.1f} GB, {found.seconds:.2f} s, MFU {found.mfu:.0%}"
        '19.1 GB, 0.28 s, MFU 78%'
    """
    it = cost.chip(chip)
    layout, batch, sequence = check(model, layout, it, batch, sequence, memory_share, efficiency)
    return judged(model, layout, it, batch, sequence, memory_share, efficiency, links)


def judged(
    model: Model,
    layout: Layout,
    chip: cost.Chip,
    batch: int,
    sequence: int,
    memory_share: float,
    efficiency: float,
    links: cost.Links | None,
) -> Candidate:
    """`estimate` of a layout that was checked."""
    small = one_device(model, layout, batch, sequence)
    local = small.batch // small.layout.parts
    ring = layout.context > 1
    state, kept = memory.peak(small.model, small.layout, chip, local, small.sequence, ring=ring)
    compute = work.computing(small.model, small.layout, chip, local, small.sequence, efficiency, ring=ring)
    sent = work.sent(small.model, small.layout, local, small.sequence)
    if links is None:
        by_axis = _published(chip, layout, small.layout.data, sent)
    else:
        by_axis = _measured(links, small.model, small.layout, sent)
    found = Candidate(
        model,
        layout,
        state,
        kept,
        memory_share * chip.hbm_bytes,
        compute,
        by_axis["data"] + by_axis["fsdp"],
        by_axis["tensor"],
        0.0,
        tuple((axis, seconds) for axis, seconds in by_axis.items() if seconds),
    )
    if layout.context * layout.expert * layout.stage > 1:
        found = with_axes(found, small, chip, efficiency, links)
    flops = float(batch * sequence * 3 * model.flops(sequence))
    return found._replace(mfu=cost.mfu(flops, found.seconds, peak=chip, chips=layout.chips))


def _published(chip: cost.Chip, layout: Layout, data: int, sent: dict[str, float]) -> dict[str, float]:
    """Seconds of what is sent over `data` ways, those of context and experts among them, and fsdp and tensor ways."""
    tensor, inner = layout.tensor, layout.expert * layout.context
    stride = {"data": tensor * (layout.fsdp if inner == 1 else 1), "fsdp": tensor * inner, "tensor": 1}
    ways = {"data": data, "fsdp": layout.fsdp, "tensor": tensor}
    return {name: sent[name] / bandwidth(chip, stride[name], ways[name], layout.chips) for name in ways}


def _measured(links: cost.Links, model: Model, layout: Layout, sent: dict[str, float]) -> dict[str, float]:
    if not isinstance(links, cost.Links):
        raise TypeError(
            f"planner: links must be a cost.Links; got {links!r}. Pass for example shardkit.bench.links(records)."
        )
    data, fsdp, tensor, accumulate, remat = layout[:5]
    layers = accumulate * model.layers
    messages = {
        "data": 2 * (data - 1),
        "fsdp": 3 * layers * (fsdp - 1),
        "tensor": (4 * accumulate + layers * work.exchanges_of(model, remat)) * (tensor - 1),
    }
    return {
        name: count * links.of(name).latency + sent[name] / links.of(name).bandwidth for name, count in messages.items()
    }


def check(
    model: Model, layout: Layout, chip: cost.Chip, batch: int, sequence: int, memory_share: float, efficiency: float
) -> tuple[Layout, int, int]:
    """The layout, batch and sequence as Python integers; refuses a layout that does not divide batch or model."""
    of_kind(model, layout)
    sizes = {name: size for name, size in layout._asdict().items() if name != "remat"}
    *ways, batch, sequence = checks.whole("planner", **sizes, batch=batch, sequence=sequence)
    whole: dict[str, Any] = dict(zip(sizes, ways, strict=True))
    layout = layout._replace(**whole)
    check_most(batch=batch, sequence=sequence)
    checks.one_of("planner", "remat", layout.remat, REMAT)
    check_shares(memory_share=memory_share, efficiency=efficiency)
    if batch % layout.parts:
        raise ValueError(
            f"planner: batch must be divisible by data * fsdp * expert * accumulate * microbatches; got {batch} over "
            f"{layout.parts}. Change the batch or the layout."
        )
    if not tensor_divides(model, chip, layout.tensor):
        raise ValueError(
            f"planner: tensor must divide heads, kv_heads and ffn, and a GPU host's chips; got {layout.tensor} for "
            f"{model.heads} heads, {model.kv_heads or model.heads} kv_heads, ffn {model.width} and chip {chip.name!r}. "
            "Choose fewer tensor ways."
        )
    if reason := why_not(model, layout, sequence):
        raise ValueError(f"planner: {reason}")
    return layout, batch, sequence


def tensor_divides(model: Model, chip: cost.Chip, tensor: int) -> bool:
    """Whether that many tensor-parallel ways divide the model, and fit into a GPU host."""
    sizes = (model.heads, model.kv_heads or model.heads, model.width, *(() if chip.torus else (chip.host,)))
    return all(size % tensor == 0 for size in sizes)


def check_shares(**shares: float) -> None:
    """Refuses what is no share."""
    for name, value in shares.items():
        if isinstance(value, bool) or not (isinstance(value, Real) and 0 < value <= 1):
            raise ValueError(f"planner: {name} must be above 0 and at most 1; got {value!r}. Pass {name}=1.")


def check_most(**numbers: int) -> None:
    """Refuses so many chips, or examples in a step, that the search would try divisors for minutes."""
    for name, number in numbers.items():
        if number > _MOST:
            raise ValueError(f"planner: {name} must be at most {_MOST:,}; got {number:.3g}. Lower it.")
