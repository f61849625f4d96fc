"""How many elements of each kind of array one device has; memory, operations and traffic are sums of them.

Worked example: two sequences of 512 tokens on a device, a model of width 1,024 with 16 heads, tensor=2. The stream
x[2, 512, 1024] has 1,048,576 elements, of which sequence parallelism leaves half on each device. Queries of 8 heads of
64 are [2, 512, 8, 64], 524,288; scores are [2, 8, 512, 512], 4,194,304.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from shardkit.planner.model import Model
from shardkit.planner.share import Share


class Sizes(NamedTuple):
    """Elements on one device, those of parameters whole over fsdp; activations are of a microbatch.

    Attributes:
        matrices: of one layer, without experts.
        experts: the experts of one layer, which tensor ways do not split.
        largest: of the largest array of a layer.
        gains: of all norms and routers, which tensor ways do not split.
        tables: embedding and head: 2, or 1 if they are tied.
        table: of each of them.
        stream: tokens times the model's width, before tensor ways split them.
        queries: tokens times the width of the queries.
        keys: tokens times the width of keys, or of values.
        inner: results of gate and up, or of up alone; of experts, those of their rows.
        rows: rows of experts, times the model's width.
        scores: of attention, against the tokens that a device has.
        written_scores: those in memory; a kernel writes none.
        saved_weights: scores that attention saves; a ring and a kernel compute their own again.
        logits: of the head.
    """

    matrices: float
    experts: float
    largest: float
    gains: float
    tables: int
    table: float
    stream: float
    queries: float
    keys: float
    inner: float
    rows: float
    scores: float
    written_scores: float
    saved_weights: float
    logits: float

    @property
    def layer(self) -> float:
        """All matrices of one layer."""
        return self.matrices + self.experts


def count_sizes(share: Share) -> Sizes:
    """The sizes of a device's share."""
    layout = share.layout
    is_ring = layout.context > 1
    return _count_sizes(share.model, layout.tensor, layout.expert, share.batch, share.sequence, is_ring)


@lru_cache(maxsize=4096)  # many layouts of a search have the same
def _count_sizes(model: Model, tensor: int, expert: int, batch: int, sequence: int, is_ring: bool) -> Sizes:
    tokens = batch * sequence
    hidden = model.hidden
    dense, experts = model.layer()
    gains = 2 * hidden + hidden * model.experts  # two norms and the router
    scores = tokens * sequence * model.heads / tensor
    inner, largest, rows = _count_feed_forward(model, tensor, expert, batch, sequence)
    return Sizes(
        # `layer` counts norms and routers among the weights, and tensor ways do not split them.
        matrices=(dense - gains) / tensor,
        experts=experts / expert,
        largest=largest,
        gains=model.layers * gains + hidden,
        tables=1 if model.tied else 2,
        table=model.vocabulary * hidden / tensor,
        stream=tokens * hidden,
        queries=tokens * model.heads * model.head / tensor,
        keys=tokens * model.key_heads * model.head / tensor,
        inner=inner,
        rows=rows * hidden,
        scores=scores,
        written_scores=0 if model.kernel else scores,
        saved_weights=0 if is_ring or model.kernel else scores,
        logits=tokens * model.vocabulary / tensor,
    )


def _count_feed_forward(model: Model, tensor: int, expert: int, batch: int, sequence: int) -> tuple[float, float, int]:
    """The results of gate and up, the largest matrix, and the rows of experts.

    Experts are whole over tensor ways, whose devices have tokens of their own.
    """
    tokens = batch * sequence
    columns = 2 if model.gated else 1
    _, experts = model.layer()  # none where all layers are dense
    if not experts:
        return tokens * model.width * columns / tensor, model.hidden * model.width / tensor, 0
    rows = model.rows(tokens // tensor, sequence // tensor, expert)
    shared_rows = tokens * model.shared / tensor
    inner = (rows + shared_rows) * model.expert_width * columns
    largest = model.experts / expert * model.hidden * model.expert_width
    return inner, largest, rows
