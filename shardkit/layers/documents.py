"""Sequences packed of documents: their blocks are dealt to devices, so that all have equally many pairs to attend over.

With documents of many lengths no fixed order is even. Contiguous chunks give the device of a long document nearly all
pairs. Zigzag order, which is even for one document, gives some device the early parts of several documents.
"""

from __future__ import annotations

import heapq

import numpy as np

from shardkit._arguments.checks import integers_from_one
from shardkit._arguments.typed import typed


@typed
def deal(segments_BT: np.ndarray, devices: int, *, block: int = 128, window: int | None = None) -> np.ndarray:
    """Deals the tokens of packed sequences to devices, so that all have the same amount of attention to compute.

    The heaviest block goes to the device with the fewest pairs and room for a block, and so on. Reorder your batch on
    the host, `np.take_along_axis(batch, order, 1)`, and pass the order itself as the positions of its tokens.

    Args:
        segments_BT: numbers of the documents, int [B, T]; tokens of a document are next to each other.
        devices: number of devices that split dim 1 of the batch.
        block: tokens that stay together; pass the same number to `ring_attention(block=...)`.
        window: as for the attention.

    Returns:
        int32 [B, T]: the token at each place, device by device; on each device in order.

    Raises:
        ValueError: segments of another rank, or tokens that devices times block do not divide.

    Cost: nothing is sent; it runs on the host, in a few milliseconds for a million tokens.

    Example:
        >>> segments = np.repeat([0, 1, 2], [10, 2, 4])[None]
        >>> sk.layers.deal(segments, 2, block=2).tolist()
        [[2, 3, 8, 9, 12, 13, 14, 15, 0, 1, 4, 5, 6, 7, 10, 11]]

    Source: Graham, bounds on multiprocessing timing anomalies (1969), for the rule.
    """
    integers_from_one("deal", devices=devices, block=block)
    if window is not None:
        integers_from_one("deal", window=window)
    shape = np.shape(segments_BT)
    are_integers = np.asarray(segments_BT).dtype.kind in "iu"
    if not are_integers or len(shape) != 2 or not shape[0] or shape[1] % (devices * block):
        kind = "" if are_integers else " of other values"
        raise ValueError(
            f"deal: segments must be integers [B, T] with T divisible by devices times block, {devices} x {block}; got "
            f"shape {shape}{kind}. Pad the sequences, or choose another block."
        )
    return np.stack([_deal_sequence(segments_T, devices, block, window) for segments_T in np.asarray(segments_BT)])


def count_pairs(segments_T: np.ndarray, window: int | None = None) -> np.ndarray:
    """How many tokens each token of a sequence attends to, itself included, [T].

    For example, segments 0 0 0 1 1 begin at tokens 0 and 3, and the counts are 1 2 3 1 2.
    """
    position_T = np.arange(len(segments_T))
    is_first_T = np.diff(segments_T, prepend=segments_T[:1] - 1) != 0
    start_T = np.maximum.accumulate(np.where(is_first_T, position_T, 0))
    count_T = position_T - start_T + 1
    if window is None:
        return count_T
    return np.minimum(count_T, window)


def _deal_sequence(segments_T: np.ndarray, devices: int, block: int, window: int | None) -> np.ndarray:
    """The tokens of one sequence, device by device: the next heaviest block goes to the least loaded device."""
    # The example of `deal`: documents of 10, 2 and 4 tokens in blocks of two, for two devices with room for four. The
    # blocks 0 to 7 have 3 7 11 15 19 3 3 7 pairs. The heaviest come first:
    #
    #     block     4   3   2   1   7   0   5   6
    #     pairs    19  15  11   7   7   3   3   3
    #     device    0   1   1   0   0   1   1   0     device 1 is full after block 5
    #
    # Device 0 has 19 + 7 + 7 + 3 = 36 pairs in the end, and device 1 has 15 + 11 + 3 + 3 = 32.
    pairs = count_pairs(segments_T, window).reshape(-1, block).sum(1)
    room = len(pairs) // devices
    load_and_device = [(0, device) for device in range(devices)]
    blocks_of_device: list[list[int]] = [[] for _ in range(devices)]
    for number in np.argsort(-pairs, kind="stable"):
        load, device = heapq.heappop(load_and_device)
        blocks_of_device[device].append(int(number))
        if len(blocks_of_device[device]) < room:
            heapq.heappush(load_and_device, (load + int(pairs[number]), device))
    order = np.concatenate([sorted(blocks) for blocks in blocks_of_device])
    tokens = order[:, None] * block + np.arange(block)
    return tokens.reshape(-1).astype(np.int32)
