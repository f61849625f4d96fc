"""Sequences packed of documents, whose blocks are dealt to devices so that all have as many pairs to attend over.

With documents of many lengths no fixed order is even: contiguous chunks give the device of a long document nearly all
pairs, and zigzag order, which is even for one document, gives some device the early parts of several.
"""

from __future__ import annotations

import heapq

import numpy as np

from shardkit._arguments.checks import whole
from shardkit._arguments.typed import typed


@typed
def deal(segments_BT: np.ndarray, devices: int, *, block: int = 128, window: int | None = None) -> np.ndarray:
    """The order in which devices hold the tokens of packed sequences, so that all have as much attention to compute.

    The heaviest block goes to the device with the fewest pairs that has room for one, and so on. A batch is reordered
    on the host, `np.take_along_axis(batch, order, 1)`, and the order itself is the positions of its tokens.

    Args:
        segments_BT: numbers of the documents, int [B, T]; tokens of a document are next to each other.
        devices: devices that split dim 1 of the batch.
        block: tokens that stay together; tiles of `ring_attention(block=...)` should be as large.
        window: as of the attention.

    Returns:
        int32 [B, T]: the token at each place, device by device; on each device in order.

    Raises:
        ValueError: segments of another rank, or tokens that devices times block do not divide.

    Cost: nothing is sent; it runs on the host, in a few milliseconds for a million tokens.

    Example:
        >>> segments = np.repeat([0, 1, 2], [10, 2, 4])[None]
        >>> sk.layers.deal(segments, 2, block=2).tolist()
        [[0, 1, 4, 5, 8, 9, 10, 11, 2, 3, 6, 7, 12, 13, 14, 15]]

    Source: Graham, bounds on multiprocessing timing anomalies (1969), for the rule.
    """
    whole("deal", devices=devices, block=block, **({} if window is None else {"window": window}))
    shape, integers = np.shape(segments_BT), np.asarray(segments_BT).dtype.kind in "iu"
    if not integers or len(shape) != 2 or not shape[0] or shape[1] % (devices * block):
        raise ValueError(
            f"deal: segments must be integers [B, T] with T divisible by devices times block, {devices} x {block}; got "
            f"shape {shape}{'' if integers else ' of other values'}. Pad the sequences, or choose another block."
        )
    return np.stack([_dealt(segments, devices, block, window) for segments in np.asarray(segments_BT)])


def pairs(segments: np.ndarray, window: int | None = None) -> np.ndarray:
    """How many tokens each token of a sequence attends to, itself included."""
    places = np.arange(len(segments))
    begins = np.maximum.accumulate(np.where(np.diff(segments, prepend=segments[:1] - 1) != 0, places, 0))
    seen = places - begins + 1
    return seen if window is None else np.minimum(seen, window)


def _dealt(segments: np.ndarray, devices: int, block: int, window: int | None) -> np.ndarray:
    work = pairs(segments, window).reshape(-1, block).sum(1)
    room = len(work) // devices
    heap = [(0, device) for device in range(devices)]
    held: list[list[int]] = [[] for _ in range(devices)]
    for number in np.argsort(-work, kind="stable"):
        load, device = heapq.heappop(heap)
        held[device].append(int(number))
        if len(held[device]) < room:
            heapq.heappush(heap, (load + int(work[number]), device))
    blocks = np.concatenate([sorted(each) for each in held])
    return (blocks[:, None] * block + np.arange(block)).reshape(-1).astype(np.int32)
