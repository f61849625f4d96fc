"""The tiles of the matrix of scores that a device computes: of its own keys, and of those that a ring brings.

A tile without a mask is whole; a causal one on the diagonal masks its upper half. Where no query sees a key, there is
no tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from shardkit.layers.zigzag import Order


class Tile(NamedTuple):
    """A square of the matrix of scores: `size` queries by `size` keys; `ahead` is as in `make_mask`."""

    query: Any  # the index of its first query on this device
    key: Any  # the index of its first key in the block that is here
    size: int
    ahead: Any = None


class TileForm(NamedTuple):
    """The static options of a tile that a kernel computes."""

    causal: bool  # whether the first query is at the place of the first key, and sees none behind it
    scale: float  # factor of the scores


class TileSizes(NamedTuple):
    """The sizes of a tile that a kernel computes, which has as many keys as queries."""

    heads: int  # of queries, of all sequences
    key_heads: int  # of keys, and as many of values
    tokens: int
    head: int  # its size
    itemsize: int  # bytes of an element

    @classmethod
    def of(cls, q_bGRtK: Any, k_bGsK: Any) -> TileSizes:
        """The sizes of the tile with these queries and keys."""
        b, G, R, t, K = q_bGRtK.shape
        return cls(b * G * R, b * G, t, K, q_bGRtK.dtype.itemsize)


class TileCounts(NamedTuple):
    """The tiles of a device in a causal attention over all blocks of a ring in zigzag order."""

    parts: int  # a tile has the device's tokens, divided by `parts`
    diagonal: int  # tiles on the diagonal, causal
    whole: int  # tiles without a mask


def count_tiles(devices: int) -> TileCounts:
    """The tiles of each device of a causal ring in zigzag order.

    Worked example: four devices with 2,048 tokens each. Tiles are of 1,024 queries and as many keys: of a device's own
    keys two causal ones and a whole one, and two whole ones of each other device, 2 and 7 in all.
    """
    if devices == 1:
        return TileCounts(parts=1, diagonal=1, whole=0)
    tokens = 2  # the fewest: the number of tiles is the same for all
    own_tiles = list_own_tiles(tokens, True, "zigzag")
    arrived_tiles = list_arrived_tiles(tokens, 0)
    diagonal = sum(tile.ahead is not None for tile in own_tiles)
    whole = len(own_tiles) - diagonal + (devices - 1) * len(arrived_tiles)
    return TileCounts(tokens // own_tiles[0].size, diagonal, whole)


def list_own_tiles(tokens: int, causal: bool, order: Order) -> list[Tile]:
    """The tiles of this device's queries and its own keys, `tokens` of both."""
    if not causal:
        return [Tile(0, 0, tokens)]
    if order == "contiguous":
        return [Tile(0, 0, tokens, ahead=0)]
    half = tokens // 2
    early = Tile(0, 0, half, ahead=0)
    late = Tile(half, half, half, ahead=0)
    late_to_early = Tile(half, 0, half)  # no mask: every late query is behind every early key
    return [early, late, late_to_early]


def list_arrived_tiles(tokens: int, start: Any) -> list[Tile]:
    """The tiles of this device's queries and the keys of another device, in zigzag order.

    `start` is 0 if the other device is before this one, and the index of the late half if it is after it.

    One hop of zigzag order, with 4 devices and 16 tokens. Device i holds chunks i and 7 - i of two tokens each:

        device 0: 0 1 | 14 15     device 1: 2 3 | 12 13     device 2: 4 5 | 10 11     device 3: 6 7 | 8 9

    On device 1, step 1 brings the keys of device 0, which is before it. Of the four pairs of halves two are needed,
    both without a mask, and two are masked as a whole:

        late queries 12 13 with early keys 0 1: all seen          early queries 2 3 with early keys 0 1: all seen
        late queries 12 13 with late keys 14 15: none             early queries 2 3 with late keys 14 15: none

    Step 2 brings the keys of device 3, which is after it, 6 7 | 8 9. Late queries 12 13 see the early keys 6 7, and
    also the late keys 8 9; early queries 2 3 see nothing. On every device and in every step it is two pairs of halves,
    of which only one starts at an index that depends on the device: equal work, without a branch.
    """
    half = tokens // 2
    return [Tile(half, 0, half), Tile(start, start, half)]
