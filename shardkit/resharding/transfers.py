"""How one array gets from one mesh to another that shares no device with it: the transfer of each leaf, as data.

`rounds.py` says who sends what to whom, `between_meshes.py` runs it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardkit._arguments.checks import format_count
from shardkit.meshes.layout import canonical, local_shape_of, spec_axes
from shardkit.plans.storage import is_key, is_padded
from shardkit.resharding.moves import LeafStorage
from shardkit.resharding.rounds import (
    Pairs,
    Round,
    Rounds,
    Side,
    cut_unit,
    divide_sizes,
    find_rounds,
    list_pairs,
)
from shardkit.resharding.views import Shape


class SendStep(NamedTuple):
    """One ppermute: rounds with the same senders and receivers."""

    pairs: Pairs  # the numbers of sender and receiver, each in its mesh
    rounds: tuple[Round, ...]


Batch = tuple[SendStep, ...]


class Staging:
    """The bytes of the pieces on their way, of which a device holds no more than a limit if one piece fits into it."""

    def __init__(self, limit: int):
        self.limit = limit
        self.held = 0
        self.most = 0  # at any time

    def admit(self, size: int) -> bool:
        """Whether so many bytes more fit; if not, those before them must be gone first."""
        fits = self.held + size <= self.limit
        if not fits:
            self.held = 0
        self.held += size
        self.most = max(self.most, self.held)
        return fits


class Transfer(NamedTuple):
    """How one leaf gets from one mesh to another."""

    path: str  # the leaf
    shape: Shape  # of the array that is sent; typed keys are sent as their integers, with a dim more
    dtype: Any  # on the source mesh
    wire: Any  # the dtype that is sent, the narrower of both
    result: Any  # the dtype on the target mesh
    source_spec: PartitionSpec
    target_spec: PartitionSpec
    source: Side
    target: Side
    route: Rounds
    pieces: Shape  # into how many pieces a unit is cut along each dim, sent one after another
    slots: int  # how many rounds one program runs

    @property
    def piece(self) -> Shape:
        """The shape of a piece of a unit."""
        return divide_sizes(self.route.unit, self.pieces)

    @property
    def crossing(self) -> int:
        """Bytes that all devices together send to the other mesh."""
        return self.route.count_messages() * self._count_bytes(self.route.unit)

    @property
    def least(self) -> int:
        """Bytes that must cross: every element once, in the narrower dtype."""
        return self._count_bytes(self.shape)

    @property
    def sent(self) -> int:
        """Bytes that the census counts: what a device sends if it has a part in every step.

        In each round a unit, and then the same to each other copy in the target.
        """
        return len(self.route.rounds) * self._count_bytes(self.route.unit) * self.target.copies

    @property
    def staging(self) -> int:
        """Bytes that a device holds at most besides source and target: pieces to send and pieces received.

        In the target, if it has copies, also what the others received.
        """
        rounds = min(self.slots, len(self.route.rounds))
        return rounds * self._count_bytes(self.piece) * count_buffers(self.target)

    @property
    def words(self) -> str:
        """The steps in words."""
        words = format_count(len(self.steps), "ppermute")
        if self.target.copies > 1 and self.route.rounds:
            words += f", all_gather {', '.join(self.target.copy_axes)}"
        return words

    @property
    def steps(self) -> tuple[SendStep, ...]:
        """The steps; rounds with the same pairs are one."""
        steps = []
        for pairs, rounds in itertools.groupby(self.route.rounds, list_pairs):
            steps.append(SendStep(pairs, tuple(rounds)))
        return tuple(steps)

    def list_batches(self) -> list[Batch]:
        """The steps of each program, in order: no program runs more rounds than fit into the staging."""
        rounds = self.route.rounds
        batches = []
        for start in range(0, len(rounds), self.slots):
            batch = self._replace(route=self.route._replace(rounds=rounds[start : start + self.slots]))
            batches.append(batch.steps)
        return batches

    def list_offsets(self) -> Iterator[Shape]:
        """Where each piece begins in its unit."""
        for number in itertools.product(*map(range, self.pieces)):
            yield tuple(index * size for index, size in zip(number, self.piece, strict=True))

    def __str__(self) -> str:
        unit = "x".join(map(str, self.route.unit)) or "one element"
        lines = [f"{self.path}: {self.words}; a unit is {unit} in {self.wire.name}"]
        pieces = math.prod(self.pieces)
        if pieces > 1:
            lines[0] += f", in {pieces} pieces"
        first_of_target = len(list(self.source.devices()))
        for number, step in enumerate(self.steps, 1):
            size = len(step.rounds) * self._count_bytes(self.route.unit)
            sends = []
            for sender, receiver in step.pairs:
                sends.append(f"{sender} to {first_of_target + receiver}")
            lines.append(f"  {number}. {', '.join(sends)}: {size:,} bytes each, {size * len(sends):,} in all")
        return "\n".join(lines)

    def _count_bytes(self, shape: Shape) -> int:
        return math.prod(shape) * self.wire.itemsize


def count_buffers(target: Side) -> int:
    """How many copies of a piece a device holds at once: one to send, one received, and in copies those of all."""
    if target.copies == 1:
        return 2
    return 2 + target.copies


def make_transfer(
    where: str,
    path: str,
    x: Any,
    before: LeafStorage,
    after: LeafStorage,
    mesh: Any,
    to: Any,
    dtype: Any,
    piece_bytes: int,
) -> Transfer:
    """The transfer of one leaf; `where` begins errors."""
    if is_padded(x) or before.storage.rows or after.storage.rows:
        raise ValueError(
            f"{where} must be stored in its original form between two meshes; got one that a plan pads, or stores in "
            "the order of stages. Pass unpadded(...) of it, and layouts that divide it."
        )
    for leaf, mesh_of_leaf in ((before, mesh), (after, to)):
        local_shape_of(where, tuple(x.shape), leaf.storage.spec, mesh_of_leaf)
    source_spec = canonical(before.storage.spec)
    target_spec = canonical(after.storage.spec)
    data = x
    if is_key(x):
        data = jax.eval_shape(jax.random.key_data, x)
    shape = tuple(data.shape)
    dtype_before = jnp.dtype(data.dtype)
    result = dtype_before
    if dtype is not None and jnp.issubdtype(dtype_before, jnp.floating):
        result = jnp.dtype(dtype)
    # Cast before the wire if that makes it narrower, else after it.
    wire = dtype_before
    if result.itemsize < dtype_before.itemsize:
        wire = result
    source = make_side(source_spec, mesh, len(shape))
    target = make_side(target_spec, to, len(shape))
    route = find_rounds(shape, source, target)
    most = max(1, piece_bytes // (wire.itemsize * count_buffers(target)))
    pieces = cut_unit(route.unit, most)
    slots = 1
    if math.prod(pieces) == 1 and math.prod(route.unit) > 0:
        slots = max(1, most // math.prod(route.unit))
    return Transfer(
        path=path,
        shape=shape,
        dtype=dtype_before,
        wire=wire,
        result=result,
        source_spec=source_spec,
        target_spec=target_spec,
        source=source,
        target=target,
        route=route,
        pieces=pieces,
        slots=slots,
    )


def make_side(spec: PartitionSpec, mesh: Any, ndim: int) -> Side:
    """A layout of an array of so many dims on a mesh."""
    axes = spec_axes(spec)
    axes += [()] * (ndim - len(axes))
    return Side(tuple(mesh.shape.items()), tuple(axes))
