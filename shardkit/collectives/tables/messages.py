"""The ppermutes that carry out one step of a table: who sends to whom, how many chunks, and which."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

Pair = tuple[int, int]  # source, target


class Send(NamedTuple):
    """One chunk on its way.

    Attributes:
        step: the step, from 0.
        source, target: the device that sends, and the device that receives.
        chunk: the number of the chunk in the whole array.
        reduce: whether the target adds it to its chunk; otherwise it replaces the chunk.
    """

    step: int
    source: int
    target: int
    chunk: int
    reduce: bool

    def __str__(self) -> str:
        if self.reduce:
            return f"{self.source}>{self.target} +{self.chunk}"
        return f"{self.source}>{self.target} {self.chunk}"


class Message(NamedTuple):
    """One ppermute.

    Attributes:
        pairs: (source, target); no device is twice a source or twice a target.
        reduce: whether targets add the chunks that arrive; otherwise they replace theirs.
        sent_rows: which chunks a device sends, int32 [devices, chunks]; 0 for a device that sends none.
        stored_rows: where a device stores what arrives, int32 [devices, chunks]; rows after the last chunk if nothing
            arrives.
    """

    pairs: tuple[Pair, ...]
    reduce: bool
    sent_rows: np.ndarray
    stored_rows: np.ndarray

    @property
    def chunks(self) -> int:
        """Chunks that each source sends."""
        return self.sent_rows.shape[1]

    @property
    def kind(self) -> tuple[object, ...]:
        """The properties that messages of one loop share: all but the numbers of their chunks."""
        sends_slice = are_consecutive(self.sent_rows)
        stores_slice = are_consecutive(self.stored_rows)
        return self.pairs, self.reduce, self.chunks, sends_slice, stores_slice

    @property
    def is_partial(self) -> bool:
        """Whether nothing arrives at some device."""
        return len(self.pairs) < len(self.stored_rows)


def are_consecutive(rows: np.ndarray) -> bool:
    """Whether each device's rows follow each other, so that they are one slice."""
    first_rows = rows[:, :1]
    return bool((rows == first_rows + np.arange(rows.shape[1])).all())


def group_sends(sends: Sequence[Send], devices: int, chunks: int) -> tuple[Message, ...]:
    """The ppermutes of one step.

    A ppermute has one shape on all devices, and each device at most once as source and once as target. So all chunks
    from one device to another go in one message, pairs with equally many chunks share a ppermute, and a device that
    sends to two others takes part in two.

    Worked example: 0>1 with chunks 0 and 1, 1>0 with chunks 2 and 3, and 2>0 with chunk 4. The first two share a
    ppermute of two chunks; the third is a ppermute of one chunk.
    """
    chunks_of: dict[tuple[Pair, bool], list[int]] = {}
    for send in sends:
        key = (send.source, send.target), send.reduce
        chunks_of.setdefault(key, []).append(send.chunk)
    pairs_of: dict[tuple[bool, int], list[Pair]] = {}
    for (pair, reduce), pair_chunks in chunks_of.items():
        pairs_of.setdefault((reduce, len(pair_chunks)), []).append(pair)
    messages = []
    for (reduce, count), pairs in pairs_of.items():
        for matching in find_matchings(pairs, devices):
            sent_rows = np.zeros((devices, count), np.int32)
            # Rows after the last chunk, unless something arrives: all devices store, and these rows are never read.
            stored_rows = np.tile(chunks + np.arange(count, dtype=np.int32), (devices, 1))
            for source, target in matching:
                rows = sorted(chunks_of[(source, target), reduce])
                sent_rows[source] = rows
                stored_rows[target] = rows
            messages.append(Message(matching, reduce, sent_rows, stored_rows))
    return tuple(messages)


def find_matchings(pairs: Iterable[Pair], devices: int) -> list[tuple[Pair, ...]]:
    """The pairs in as few parts as possible in which each device is a source once, and a target once.

    It is an edge coloring of a bipartite graph: sources on one side, targets on the other, and a part is a color. A new
    pair takes the first part that is free at its source. If its target has another pair in this part, the other pair
    changes to the part that is free at the target, and so on along a path of pairs in these two parts, alternately.

    Worked example: 1>2, 0>2 and 1>3, in this order. 1>2 takes part 0. Part 0 is free at the source of 0>2, but not at
    its target: 1>2 changes to part 1, and 0>2 takes part 0. 1>3 then takes part 0, which 1>2 has left.

    Source: König (1916): as many parts as the busiest device has pairs.
    """
    target_of: defaultdict[int, dict[int, int]] = defaultdict(dict)  # by source and part
    source_of: defaultdict[int, dict[int, int]] = defaultdict(dict)  # by target and part

    def distance_first(pair: Pair) -> tuple[int, Pair]:
        source, target = pair
        return (target - source) % devices, pair

    # Pairs of one distance come one after the other: if each distance is a complete shift round the ring, each shift is
    # one ppermute.
    for source, target in sorted(pairs, key=distance_first):
        free_at_source = _find_free_part(target_of[source])
        free_at_target = _find_free_part(source_of[target])
        path = _find_alternating_path(target_of, source_of, target, free_at_source, free_at_target)
        for path_source, path_target, part in path:
            del target_of[path_source][part]
            del source_of[path_target][part]
        other_part = {free_at_source: free_at_target, free_at_target: free_at_source}
        for path_source, path_target, part in path:
            target_of[path_source][other_part[part]] = path_target
            source_of[path_target][other_part[part]] = path_source
        target_of[source][free_at_source] = target
        source_of[target][free_at_source] = source
    pairs_by_part: defaultdict[int, list[Pair]] = defaultdict(list)
    for source, target_by_part in sorted(target_of.items()):
        for part, target in target_by_part.items():
            pairs_by_part[part].append((source, target))
    return [tuple(pairs_by_part[part]) for part in sorted(pairs_by_part)]


def _find_alternating_path(
    target_of: Mapping[int, Mapping[int, int]],
    source_of: Mapping[int, Mapping[int, int]],
    target: int,
    part: int,
    other_part: int,
) -> list[tuple[int, int, int]]:
    """The pairs (source, target, part) from `target` on, in `part` and `other_part` by turns."""
    path = []
    while part in source_of[target]:
        source = source_of[target][part]
        path.append((source, target, part))
        if other_part not in target_of[source]:
            break
        target = target_of[source][other_part]
        path.append((source, target, other_part))
    return path


def _find_free_part(parts: Mapping[int, int]) -> int:
    """The first part in which a device has no pair."""
    part = 0
    while part in parts:
        part += 1
    return part
