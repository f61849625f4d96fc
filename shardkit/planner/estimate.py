"""The memory and the step time of a transformer's layout, by arithmetic; `aot.compile` measures.

- Memory per device: that of the worst moment of a step, by the list of buffers in `memory.py`.
- Time per step: that of the operations in `work.py`, whose matmuls reach `efficiency` of the chip's peak, and of what
  is sent. FSDP's and data parallelism's collectives overlap with compute, tensor parallelism's do not: step =
  max(compute, fsdp + data) + tensor.
- Bandwidth, as for `aot` (`analysis/hlo/compute.py`): a torus group sends over the dimensions along which it extends
  in a square or cube of all chips. A GPU's tensor group is within a host; the others send at NVLink's speed within a
  host, and across hosts at the network's times the members per host, if that is less: each GPU has its own adapter.
  Latency is left out, so times are lower bounds.
- With `links`, as measured, each kind of ways has the bandwidth of its link instead, and every message its latency: a
  layer is gathered twice and scattered once per microbatch over fsdp, gradients are reduced once per step over data,
  and a layer exchanges over tensor as often as `EXCHANGES` says.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from shardkit import cost
from shardkit._arguments import checks
from shardkit.planner import memory, work
from shardkit.planner.candidates import REMAT, Candidate, Layout, Model, of_kind


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
        links: as measured (`bench.links`), of the axes "data", "fsdp" and "tensor"; None: as published for the chip.

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
    local = batch // (layout.data * layout.fsdp * layout.accumulate)
    state, kept = memory.peak(model, layout, it, local, sequence)
    compute = work.computing(model, layout, it, local, sequence, efficiency)
    sent = work.sent(model, layout, local, sequence)
    seconds_of = _published(it, layout, sent) if links is None else _measured(links, model, layout, sent)
    hidden, exposed = seconds_of["data"] + seconds_of["fsdp"], seconds_of["tensor"]
    seconds = max(compute, hidden) + exposed
    sizes: Any = {name: value for name, value in model._asdict().items() if name != "tied"}
    model_flops = cost.transformer_flops(**sizes, sequence=sequence, batch=batch)
    return Candidate(
        model,
        layout,
        state,
        kept,
        memory_share * it.hbm_bytes,
        compute,
        hidden,
        exposed,
        cost.mfu(model_flops, seconds, peak=it, chips=layout.chips),
    )


def _published(chip: cost.Chip, layout: Layout, sent: dict[str, float]) -> dict[str, float]:
    strides = {"data": layout.tensor * layout.fsdp, "fsdp": layout.tensor, "tensor": 1}
    return {
        name: sent[name] / _bandwidth(chip, at, getattr(layout, name), layout.chips) for name, at in strides.items()
    }


def _measured(links: cost.Links, model: Model, layout: Layout, sent: dict[str, float]) -> dict[str, float]:
    if not isinstance(links, cost.Links):
        raise TypeError(
            f"planner: links must be a cost.Links; got {links!r}. Pass for example shardkit.bench.links(records)."
        )
    data, fsdp, tensor, accumulate, remat = layout
    layers = accumulate * model.layers
    messages = {
        "data": 2 * (data - 1),
        "fsdp": 3 * layers * (fsdp - 1),
        "tensor": (4 * accumulate + layers * work.EXCHANGES[remat]) * (tensor - 1),
    }
    return {
        name: messages[name] * links.of(name).latency + size / links.of(name).bandwidth for name, size in sent.items()
    }


def _bandwidth(chip: cost.Chip, stride: int, ways: int, chips: int) -> float:
    if chip.torus:
        side = chips ** (1 / chip.torus)
        dims = math.ceil(math.log(ways, side) - 1e-9) if ways > 1 else 1
        return cost.group_bandwidth(chip, min(dims, chip.torus))
    if stride * ways <= chip.host:
        return chip.link_bandwidth
    return min(chip.link_bandwidth, chip.network_bandwidth * max(1, chip.host // stride))


def check(
    model: Model, layout: Layout, chip: cost.Chip, batch: int, sequence: int, memory_share: float, efficiency: float
) -> tuple[Layout, int, int]:
    """The layout, batch and sequence as Python integers; refuses a layout that does not divide batch or model."""
    of_kind(model, layout)
    data, fsdp, tensor, accumulate, batch, sequence = checks.whole(
        "planner",
        data=layout.data,
        fsdp=layout.fsdp,
        tensor=layout.tensor,
        accumulate=layout.accumulate,
        batch=batch,
        sequence=sequence,
    )
    layout = Layout(data, fsdp, tensor, accumulate, layout.remat)
    checks.one_of("planner", "remat", layout.remat, REMAT)
    for name, value in (("memory_share", memory_share), ("efficiency", efficiency)):
        if isinstance(value, bool) or not (isinstance(value, Real) and 0 < value <= 1):
            raise ValueError(f"planner: {name} must be above 0 and at most 1; got {value!r}. Pass {name}=1.")
    pieces = layout.data * layout.fsdp * layout.accumulate
    if batch % pieces:
        raise ValueError(
            f"planner: batch must be divisible by data * fsdp * accumulate; got {batch} over {pieces}. "
            "Change the batch or the layout."
        )
    if not tensor_divides(model, chip, layout.tensor):
        raise ValueError(
            f"planner: tensor must divide heads, kv_heads and ffn, and a GPU host's chips; got {layout.tensor} for "
            f"{model.heads} heads, {model.kv_heads or model.heads} kv_heads, ffn {model.width} and chip {chip.name!r}. "
            "Choose fewer tensor ways."
        )
    return layout, batch, sequence


def tensor_divides(model: Model, chip: cost.Chip, tensor: int) -> bool:
    """Whether that many tensor-parallel ways divide the model, and fit into a GPU host."""
    sizes = (model.heads, model.kv_heads or model.heads, model.width, *(() if chip.torus else (chip.host,)))
    return all(size % tensor == 0 for size in sizes)
