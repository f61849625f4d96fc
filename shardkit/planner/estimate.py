"""The memory and the step time of a transformer's layout, by the model stated here.

Everything is arithmetic from `shardkit.cost`; nothing is traced or compiled (`aot.compile` measures). The model:

- Memory per device: float32 master parameters and two Adam moments (12 bytes per parameter) and float32 gradients (4),
  both over fsdp * tensor; two layers and the embedding gathered in bfloat16, over tensor; `model_activation_memory`
  with sequence parallelism, its feed-forward part scaled to this model's, and under full remat one more layer, which
  the backward recomputes. Attention that saves no scores is remat "selective".
- Time per step: compute is the FLOPs, with those that remat repeats (full: the whole layer, though a compiler drops its
  last matmul), over the chips' peak times `efficiency`. FSDP's gathers (bfloat16, twice per microbatch) and reductions
  (float32), and data parallelism's all_reduce once per step, overlap with compute; tensor parallelism's collectives
  (bfloat16) do not: step = max(compute, fsdp + data) + tensor.
- Bandwidth: on a torus one dimension is for tensor parallelism and the others for the rest, or all of them without
  tensor parallelism; all chips are in one slice. A GPU's tensor group is within a host; the other groups send at
  NVLink's speed within a host, and across hosts at the network's speed times the members per host, if that is less.
  Latency is left out, so times are lower bounds.
- With `links`, as measured, each kind of ways has the bandwidth of its link instead, and every message its latency: a
  layer is gathered twice and scattered once per microbatch over fsdp, gradients are reduced once per step over data,
  and a layer exchanges as often over tensor as `tensor_volume` says.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

from shardkit import cost
from shardkit._arguments import checks
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
        '36.2 GB, 0.22 s, MFU 100%'
    """
    it = cost.chip(chip)
    layout, batch, sequence = check(model, layout, it, batch, sequence, memory_share, efficiency)
    data, fsdp, tensor, accumulate, remat = layout
    local = batch // (data * fsdp * accumulate)
    parameters = model.parameters()
    layer = model.parameters(1, 0) - model.hidden  # without the final norm
    state = 16 * parameters / (fsdp * tensor) + 2 * (2 * layer + model.vocabulary * model.hidden) / tensor
    kept = _activations(model, local, sequence, tensor, remat)

    forward, scores = model.flops(sequence), model.flops(sequence) - model.flops(0)
    repeated = {"none": 0, "selective": scores, "full": model.flops(sequence, vocabulary=0)}[remat]
    model_flops = float(batch * sequence * 3 * forward)
    compute = batch * sequence * (3 * forward + repeated) / (layout.chips * it.flops * efficiency)
    piece = parameters / tensor
    gathered = cost.zero_volume(piece, fsdp, 3, accumulate=accumulate, parameter_bytes=2, gradient_bytes=4)
    reduced = cost.zero_volume(piece / fsdp, data, 0, gradient_bytes=4)
    exchanged = cost.tensor_volume(
        batch=local, sequence=sequence, hidden=model.hidden, ways=tensor, sequence_parallel=True, recompute=remat
    )
    sent = {"data": reduced, "fsdp": gathered, "tensor": accumulate * model.layers * exchanged.total}
    seconds_of = _published(it, layout, sent) if links is None else _measured(links, model, layout, sent)
    hidden, exposed = seconds_of["data"] + seconds_of["fsdp"], seconds_of["tensor"]
    seconds = max(compute, hidden) + exposed
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


def _activations(model: Model, batch: int, sequence: int, tensor: int, remat: str) -> float:
    # the paper's layer saves 16sbh bytes between its feed-forward matrices, this one 4 or 6 bytes per token and width
    extra = (6 if model.gated else 4) * model.width / model.hidden - 16
    feed_forward = extra * sequence * batch * model.hidden / tensor
    sizes: dict[str, Any] = {"batch": batch, "sequence": sequence, "hidden": model.hidden, "heads": model.heads}
    sizes |= {"kv_heads": model.kv_heads, "tensor": tensor, "sequence_parallel": True}

    def layer(recompute: str) -> float:
        saved = cost.activation_memory(**sizes, recompute=recompute)
        return saved if recompute == "full" else saved + feed_forward

    around = cost.model_activation_memory(model.layers, **sizes, vocabulary=model.vocabulary, recompute="full")
    around -= model.layers * layer("full")
    # while its backward runs, the residuals of the recomputed layer exist too; its attention saves no scores
    return around + model.layers * layer(remat) + (layer("selective") if remat == "full" else 0)


def _published(chip: cost.Chip, layout: Layout, sent: dict[str, float]) -> dict[str, float]:
    data, fsdp, tensor = layout[:3]
    bandwidths = {
        "data": bandwidth(chip, tensor * fsdp, data, tensor),
        "fsdp": bandwidth(chip, tensor, fsdp, tensor),
        "tensor": cost.group_bandwidth(chip),
    }
    return {name: size / bandwidths[name] for name, size in sent.items()}


def _measured(links: cost.Links, model: Model, layout: Layout, sent: dict[str, float]) -> dict[str, float]:
    if not isinstance(links, cost.Links):
        raise TypeError(
            f"planner: links must be a cost.Links; got {links!r}. Pass for example shardkit.bench.links(records)."
        )
    data, fsdp, tensor, accumulate, remat = layout
    layers = accumulate * model.layers
    reductions = 6 if remat == "full" else 4
    messages = {
        "data": 2 * (data - 1),
        "fsdp": 3 * layers * (fsdp - 1),
        "tensor": reductions * layers * 2 * (tensor - 1),
    }
    return {
        name: messages[name] * links.of(name).latency + size / links.of(name).bandwidth for name, size in sent.items()
    }


def bandwidth(chip: cost.Chip, stride: int, ways: int, tensor: int) -> float:
    """Bytes per second that a device sends in a group of so many ways, whose members are `stride` devices apart."""
    if chip.torus:
        return cost.group_bandwidth(chip, chip.torus if tensor == 1 else max(1, chip.torus - 1))
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
    check_shares(memory_share=memory_share, efficiency=efficiency)
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


def tensor_divides(model: Model, chip: cost.Chip, tensor: int) -> bool:
    """Whether that many tensor-parallel ways divide the model, and fit into a GPU host."""
    sizes = (model.heads, model.kv_heads or model.heads, model.width, *(() if chip.torus else (chip.host,)))
    return all(size % tensor == 0 for size in sizes)
