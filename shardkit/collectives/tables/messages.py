"""The ppermutes that carry out one step of a table: who sends to whom, how many chunks, and which."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

Pair = tuple[int, int]  # source, target


class Send(NamedTuple):
    """One chunk on its way.

    Attributes:
        step: when, from 0.
        source, target: from which device to which.
        chunk: which chunk of the whole array.
        reduce: whether it is added to what the target has; else it takes its place.
    """

    step: int
    source: int
    target: int
    chunk: int
    reduce: bool

    def __str__(self) -> str:
        return f"{self.source}>{self.target} {'+' * self.reduce}{self.chunk}"


class Message(NamedTuple):
    """One ppermute.

    Attributes:
        pairs: (source, target); no device is twice a source or twice a target.
        reduce: whether they are added.
        taken: which chunks a device sends, int32 [devices, each]; 0 for one that sends none.
        put: where a device puts what arrives, int32 [devices, each]; rows after the last chunk if nothing arrives.
    """

    pairs: tuple[Pair, ...]
    reduce: bool
    taken: np.ndarray
    put: np.ndarray

    @property
    def each(self) -> int:
        """Chunks that each source sends."""
        return self.taken.shape[1]

    @property
    def kind(self) -> tuple[object, ...]:
        """What messages of one loop have in common."""
        return self.pairs, self.reduce, self.each, consecutive(self.taken), consecutive(self.put)

    @property
    def partial(self) -> bool:
        """Whether nothing arrives at some device."""
        return len(self.pairs) < len(self.put)


def consecutive(rows: np.ndarray) -> bool:
    """Whether each device's rows follow each other, so that they are one slice."""
    return bool((rows == rows[:, :1] + np.arange(rows.shape[1])).all())


def messages(sends: Sequence[Send], devices: int, chunks: int) -> tuple[Message, ...]:
    """The ppermutes of one step; all that one device sends to another with as many chunks goes in one."""
    between: dict[tuple[Pair, bool], list[int]] = {}
    for send in sends:
        between.setdefault(((send.source, send.target), send.reduce), []).append(send.chunk)
    alike: dict[tuple[bool, int], list[Pair]] = {}
    for (pair, reduce), sent in between.items():
        alike.setdefault((reduce, len(sent)), []).append(pair)
    found = []
    for (reduce, count), pairs in alike.items():
        for matching in matchings(pairs, devices):
            taken = np.zeros((devices, count), np.int32)
            put = np.tile(chunks + np.arange(count, dtype=np.int32), (devices, 1))
            for source, target in matching:
                taken[source] = put[target] = sorted(between[(source, target), reduce])
            found.append(Message(matching, reduce, taken, put))
    return tuple(found)


def matchings(pairs: Iterable[Pair], devices: int) -> list[tuple[Pair, ...]]:
    """The pairs in as few parts as possible in which each device is a source once, and a target once.

    Source: König (1916): as many as the busiest device has; where two pairs want the same part, those on the way
    between them change places.
    """
    target_of: list[dict[int, int]] = [{} for _ in range(devices)]  # by source and part
    source_of: list[dict[int, int]] = [{} for _ in range(devices)]
    for source, target in sorted(pairs, key=lambda pair: ((pair[1] - pair[0]) % devices, pair)):
        mine, theirs = _free(target_of[source]), _free(source_of[target])
        way, end, part, other = [], target, mine, theirs
        while part in source_of[end]:
            start = source_of[end][part]
            way.append((start, end, part))
            if other not in target_of[start]:
                break
            end = target_of[start][other]
            way.append((start, end, other))
        for start, end, part in way:
            del target_of[start][part], source_of[end][part]
        for start, end, part in [*((s, t, theirs if p == mine else mine) for s, t, p in way), (source, target, mine)]:
            target_of[start][part], source_of[end][part] = end, start
    count = 1 + max((part for parts in target_of for part in parts), default=-1)
    return [
        tuple((source, parts[number]) for source, parts in enumerate(target_of) if number in parts)
        for number in range(count)
    ]


def _free(parts: dict[int, int]) -> int:
    """The first part that is not taken."""
    return next(number for number in range(len(parts) + 1) if number not in parts)
