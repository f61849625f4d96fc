"""The share of one device: which layers, sequences and microbatches of a step a layout gives it.

Memory, operations and traffic are formulas of data, fsdp and tensor ways. The other axes are brought back to them:

- A stage is a model of layers / stages, with the pipeline's microbatches in the place of accumulated ones. Every stage
  holds embedding and head.
- Context ways are data ways of a batch that is so many times larger, in sequences that are as many times shorter.
- Expert ways are data ways, over which experts are split and not reduced.

Worked example: 32 layers and 64 sequences of 4,096 tokens on stage=2, data=4, context=2, with 8 microbatches. A device
has 16 layers. Of 8 microbatches it runs 64 / (4 * 8) = 2 sequences each, and 2,048 tokens of each sequence. Its
gradients are summed over 8 copies: 4 of data, 2 of context.
"""

from __future__ import annotations

from typing import NamedTuple

from shardkit.layers.attention_kernel import TOKENS
from shardkit.layers.tiles import count_tiles
from shardkit.planner.layout import Layout
from shardkit.planner.model import Model


class Share(NamedTuple):
    """What one device has of a step.

    Attributes:
        model: the model, with the layers of one stage.
        layout: the layout.
        passes: microbatches, one after the other: accumulated ones and those of a pipeline.
        batch: sequences of a microbatch.
        sequence: tokens that it has of each sequence.
    """

    model: Model
    layout: Layout
    passes: int
    batch: int
    sequence: int

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch, before tensor ways split them."""
        return self.batch * self.sequence

    @property
    def layer_runs(self) -> int:
        """How often a step runs a layer forward."""
        return self.passes * self.model.layers

    @property
    def replicas(self) -> int:
        """Devices with the same parameters but for experts, which sum their gradients; fsdp ways are not counted."""
        return self.layout.data * self.layout.context * self.layout.expert

    @property
    def expert_replicas(self) -> int:
        """Devices with the same experts, fsdp and tensor ways not counted."""
        return self.layout.data * self.layout.context

    @property
    def recomputes(self) -> bool:
        """Whether a backward pass runs a layer again: by remat, to gather its weights, or from a stage's input."""
        return self.layout.remat != "none" or self.layout.fsdp > 1 or self.layout.stage > 1


def find_share(model: Model, layout: Layout, batch: int, sequence: int) -> Share:
    """The share of a device, of `batch` sequences per step over all devices."""
    stage_model = model
    if layout.stage > 1:
        # The layers of a stage are taken to be alike.
        stage_model = model._replace(layers=model.layers // layout.stage, dense=0)
    return Share(
        model=stage_model,
        layout=layout,
        passes=layout.accumulate * layout.microbatches,
        batch=batch // layout.parts,
        sequence=sequence // layout.context,
    )


def find_misfit(model: Model, layout: Layout, sequence: int) -> str:
    """Why the layout does not divide the model or the sequence, as a sentence; "" if it does."""
    layer_parts = layout.stage * layout.chunks
    if model.layers % layer_parts:
        return (
            f"stage * chunks must divide the layers; got {layout.stage} * {layout.chunks} for {model.layers} layers. "
            "Choose fewer stages or chunks."
        )
    is_pipelined = layout.chunks > 1 or layout.microbatches > 1
    if layout.stage == 1 and is_pipelined:
        return (
            f"chunks and microbatches must be 1 without stages; got chunks={layout.chunks}, "
            f"microbatches={layout.microbatches}. Pass stages, or accumulate={layout.microbatches}."
        )
    parts = layout.context * count_tiles(layout.context).parts
    sequence_parts = layout.tensor * parts
    if sequence % sequence_parts:
        return (
            f"a sequence must be divisible by tensor ways and by 2 * context; got {sequence} tokens over "
            f"{sequence_parts} parts. Choose another sequence or fewer ways."
        )
    tile = sequence // parts
    if model.kernel and tile % TOKENS:
        return (
            f"the tokens of a tile must be a multiple of {TOKENS} for the kernel; got {tile}, of {sequence} tokens "
            f"over {layout.context} context ways. Choose another sequence, fewer ways, or kernel=False."
        )
    if layout.expert > 1 and not _experts_divide(model, layout.expert):
        return f"expert must divide the experts; got {layout.expert} for {model.experts} experts. Choose fewer ways."
    return ""


def _experts_divide(model: Model, ways: int) -> bool:
    has_experts = model.experts > 0 and model.dense < model.layers
    return has_experts and model.experts % ways == 0
