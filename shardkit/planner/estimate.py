"""What a layout of a transformer needs and how fast it steps, by a stated model.

Everything is arithmetic from `shardkit.cost`; nothing is traced or compiled (`aot.compile` is the judge). The model:

- Memory of a device: float32 master parameters and two Adam moments (12 bytes a parameter) and float32 gradients (4),
  both over fsdp * tensor; two layers and the embedding gathered in bfloat16, over tensor; `model_activation_memory`
  with sequence parallelism, its feed-forward part scaled to this model's, and under full remat one layer more, which
  the backward computes again. Attention that keeps no scores is remat "selective".
- Time of a step: compute is the FLOPs, with what remat repeats (full: the whole layer, though a compiler drops its last
  matrix), over the chips' peak times `efficiency`. FSDP's gathers (bfloat16, twice a microbatch) and reductions
  (float32), and data parallelism's all_reduce once a step, hide behind it; tensor parallelism's collectives (bfloat16)
  do not: step = max(compute, fsdp + data) + tensor.
- Bandwidth: on a torus one dimension serves tensor parallelism and the others the rest, or all do when there is no
  tensor parallelism; all chips are in one slice. A GPU's tensor group stays in its host; the other groups send at
  NVLink's speed inside it, and across hosts at the network's times the members that a host has, if that is less.
  Latency is left out, so times are lower bounds.
"""

from __future__ import annotations

from numbers import Real
from typing import NamedTuple

from shardkit import _check, cost

REMAT = ("none", "selective", "full")


class Model(NamedTuple):
    """The sizes of a decoder-only transformer.

    Attributes:
        layers: number of layers.
        hidden: model width.
        heads: attention heads.
        vocabulary: number of token values.
        kv_heads: key/value heads; None: heads.
        ffn: width of the feed-forward layers; None: 4 hidden.
        gated: a third feed-forward matrix (SwiGLU).
        tied: the embedding is the output head.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    kv_heads: int | None = None
    ffn: int | None = None
    gated: bool = True
    tied: bool = False

    @property
    def width(self) -> int:
        """The width of the feed-forward layers."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    def parameters(self, layers: int | None = None, vocabulary: int | None = None) -> int:
        """The number of parameters, or those of fewer layers or of another vocabulary."""
        return cost.transformer_parameters(
            layers=self.layers if layers is None else layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            ffn=self.ffn,
            gated=self.gated,
            biases=False,
            tied=self.tied,
            final_norm=True,
            vocabulary=self.vocabulary if vocabulary is None else vocabulary,
        )


class Layout(NamedTuple):
    """How a machine is used.

    Attributes:
        data: data-parallel ways, which hold copies.
        fsdp: ways over which parameters, gradients and optimizer state are sharded, layer by layer.
        tensor: tensor-parallel ways, with sequence parallelism.
        accumulate: microbatches in a step.
        remat: what the backward computes again: "none", "selective" (attention's core) or "full" (each layer).
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    accumulate: int = 1
    remat: str = "none"

    @property
    def chips(self) -> int:
        """Chips that the layout takes."""
        return self.data * self.fsdp * self.tensor

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self._asdict().items())


class Candidate(NamedTuple):
    """A layout and what the model estimates for it, on one device.

    Attributes:
        layout: the layout.
        state_bytes: parameters, optimizer state and gradients, and what is gathered.
        activation_bytes: activations kept for the backward.
        usable_bytes: what of the chip's memory may be used.
        compute_seconds: a step's compute.
        hidden_seconds: a step's FSDP and data-parallel communication, which can hide behind compute.
        exposed_seconds: a step's tensor-parallel communication, which cannot.
        mfu: model FLOPs utilisation, a fraction.
    """

    layout: Layout
    state_bytes: float
    activation_bytes: float
    usable_bytes: float
    compute_seconds: float
    hidden_seconds: float
    exposed_seconds: float
    mfu: float

    @property
    def bytes(self) -> float:
        """Bytes of memory in all."""
        return self.state_bytes + self.activation_bytes

    @property
    def fits(self) -> bool:
        """Whether they are within what may be used."""
        return self.bytes <= self.usable_bytes

    @property
    def seconds(self) -> float:
        """Seconds a step."""
        return max(self.compute_seconds, self.hidden_seconds) + self.exposed_seconds


def estimate(
    model: Model,
    layout: Layout,
    *,
    chip: str | cost.Chip,
    batch: int,
    sequence: int,
    memory_share: float = 0.9,
    efficiency: float = 1.0,
) -> Candidate:
    """What the module's model says of one layout.

    Args:
        model: the sizes.
        layout: the layout.
        chip: a chip or its name.
        batch: sequences in a step, over all devices.
        sequence: tokens a sequence.
        memory_share: how much of the chip's memory may be used; the rest is the compiler's and the allocator's.
        efficiency: share of the peak that matmuls reach.

    Returns:
        Candidate, in bytes and seconds.

    Raises:
        TypeError: what is no Layout.
        ValueError: a size below 1, a batch that does not divide over the layout, tensor ways that do not divide the
            model or leave a GPU host, an unknown chip or remat, or a share outside 0 to 1.
    """
    it = cost.chip(chip)
    layout, batch, sequence = check(model, layout, it, batch, sequence, memory_share, efficiency)
    data, fsdp, tensor, accumulate, remat = layout
    local = batch // (data * fsdp * accumulate)
    parameters = model.parameters()
    layer = model.parameters(1, 0) - model.hidden  # without the final norm
    state = 16 * parameters / (fsdp * tensor) + 2 * (2 * layer + model.vocabulary * model.hidden) / tensor
    kept = _activations(model, local, sequence, tensor, remat)

    model_flops, hardware_flops = (
        cost.transformer_flops(
            layers=model.layers,
            hidden=model.hidden,
            heads=model.heads,
            kv_heads=model.kv_heads,
            ffn=model.ffn,
            gated=model.gated,
            sequence=sequence,
            batch=batch,
            vocabulary=model.vocabulary,
            recompute=r,
        )
        for r in ("none", remat)
    )
    # the published form of selective recomputation counts three times the products that are repeated
    repeated = (hardware_flops - model_flops) / (3 if remat == "selective" else 1)
    compute = (model_flops + repeated) / (layout.chips * it.flops * efficiency)
    piece = parameters / tensor
    gathered = cost.zero_volume(piece, fsdp, 3, accumulate=accumulate, parameter_bytes=2, gradient_bytes=4)
    reduced = cost.zero_volume(piece / fsdp, data, 0, gradient_bytes=4)
    exchanged = cost.tensor_volume(
        batch=local, sequence=sequence, hidden=model.hidden, ways=tensor, sequence_parallel=True, recompute=remat
    )
    hidden = gathered / _bandwidth(it, tensor, fsdp, tensor) + reduced / _bandwidth(it, tensor * fsdp, data, tensor)
    exposed = accumulate * model.layers * exchanged.total / cost.group_bandwidth(it)
    seconds = max(compute, hidden) + exposed
    return Candidate(
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
    # the paper's layer keeps 16sbh bytes between its two feed-forward matrices, this one 4 or 6 bytes a token and width
    extra = (6 if model.gated else 4) * model.width / model.hidden - 16
    feed_forward = extra * sequence * batch * model.hidden / tensor

    def layer(recompute: str) -> float:
        kept = cost.activation_memory(
            batch=batch,
            sequence=sequence,
            hidden=model.hidden,
            heads=model.heads,
            kv_heads=model.kv_heads,
            tensor=tensor,
            sequence_parallel=True,
            recompute=recompute,
        )
        return kept if recompute == "full" else kept + feed_forward

    around = cost.model_activation_memory(
        model.layers,
        batch=batch,
        sequence=sequence,
        hidden=model.hidden,
        heads=model.heads,
        vocabulary=model.vocabulary,
        tensor=tensor,
        sequence_parallel=True,
        recompute="full",
    ) - model.layers * layer("full")
    # the layer that is computed again is whole while its backward runs; its attention keeps no scores
    return around + model.layers * layer(remat) + (layer("selective") if remat == "full" else 0)


def _bandwidth(chip: cost.Chip, stride: int, ways: int, tensor: int) -> float:
    if chip.torus:
        return cost.group_bandwidth(chip, chip.torus if tensor == 1 else max(1, chip.torus - 1))
    if stride * ways <= chip.host:
        return chip.link_bandwidth
    return min(chip.link_bandwidth, chip.network_bandwidth * max(1, chip.host // stride))


def share(**values: float) -> None:
    """Refuses what is no share of a whole."""
    for name, value in values.items():
        if isinstance(value, bool) or not (isinstance(value, Real) and 0 < value <= 1):
            raise ValueError(f"planner: {name} must be above 0 and at most 1; got {value!r}. Correct {name}.")


def check(
    model: Model,
    layout: Layout,
    chip: cost.Chip,
    batch: int,
    sequence: int,
    memory_share: float,
    efficiency: float,
) -> tuple[Layout, int, int]:
    """The layout, batch and sequence in Python's integers; refuses a layout that does not divide the batch or the
    model, and shares that are none."""
    of_kind(model, layout)
    data, fsdp, tensor, accumulate, batch, sequence = _check.whole(
        "planner",
        data=layout.data,
        fsdp=layout.fsdp,
        tensor=layout.tensor,
        accumulate=layout.accumulate,
        batch=batch,
        sequence=sequence,
    )
    layout = Layout(data, fsdp, tensor, accumulate, layout.remat)
    _check.known("planner", "remat", layout.remat, REMAT)
    share(memory_share=memory_share, efficiency=efficiency)
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


def of_kind(model: Model, *layouts: Layout) -> None:
    """Refuses what is no Model, or no Layout."""
    if not isinstance(model, Model):
        raise TypeError(
            f"planner: model must be a Model; got {model!r}. Pass for example planner.Model(layers=8, hidden=64, "
            "heads=4, vocabulary=256)."
        )
    for layout in layouts:
        if isinstance(layout, Layout):
            continue
        raise TypeError(
            f"planner: layout must be a Layout; got {layout!r}. Pass for example planner.Layout(fsdp=8, tensor=2)."
        )


def tensor_divides(model: Model, chip: cost.Chip, tensor: int) -> bool:
    """Whether that many tensor-parallel ways divide the model, and stay in a GPU's host."""
    sizes = (model.heads, model.kv_heads or model.heads, model.width, *(() if chip.torus else (chip.host,)))
    return all(size % tensor == 0 for size in sizes)
