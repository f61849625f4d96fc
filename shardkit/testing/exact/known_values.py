"""Which values of the program on the mesh the reference has, too.

Worked example: the reference is `tanh(x @ w)`, and the kernel `tanh(psum(x_f @ w_f, "tp") / 2)`. Its product x_f @ w_f
is known, as "summed over 'tp'" it is that of the reference; the psum is known, too. The division is not: the first
value that the reference does not have.

An algorithm of blocks has values that no program for one device has, as the largest number of a block. They are no
mistakes: a value that one device computes of its blocks alone, across the dim of which it has a block, counts as known.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from shardkit._jax.jaxprs import kind_of
from shardkit.testing.exact.forms import (
    digest,
    digest_value,
    is_number,
    list_blocks,
    list_forms,
    take_residues,
)
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.record import Event, Record
from shardkit.testing.exact.repairs import Call
from shardkit.testing.exact.rules.operands import Operand

# Equations that only pass elements on: a value's origin is behind them.
PASS = ("broadcast_in_dim", "convert_element_type", "reshape", "scan", "shard_map", "squeeze", "transpose")
_MOVES = (*PASS, "concatenate", "dynamic_slice", "expand_dims", "gather", "pad", "rev", "slice", "split", "stack")
# A result of these may have only some elements of an operand.
_PARTS = ("dynamic_slice", "gather", "select_n", "slice", "split")
# Collectives that only pass elements on.
_SENT = ("all_gather", "all_gather_invariant", "pvary", "pcast")
# Equations that mix the elements of a dim: of a block they give a value that no program for one device has.
_MIXES = ("reduce_max", "reduce_min", "sort", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
_MOST_DIMS = 3  # of a value that is looked for in all orders of its dims
# How much less likely a mistake is at an equation whose result the reference has.
KNOWN, KNOWN_ON_ONE, KNOWN_BEFORE = 3.0, 1.0, 0.5


class KnownValues:
    """The values of a run on the mesh, and which of them the reference has.

    Attributes:
        record: the run on the mesh.
        reference: the run of the reference.
        computed: the values that the reference computed, by digest; not those that are elements of inputs alone.
        known: the digests of all values of the reference, and of the inputs on the mesh.
        on_devices: if the reference has a shard_map of its own, the digests of what its devices have, all together.
        made: of a number on the mesh, by its id, the event that made it.
        near: the numbers of the events that read the result of a collective, or the index of a device.
    """

    def __init__(self, field: Field, reference: Record, record: Record):
        self.field = field
        self.record = record
        self.reference = reference
        self.computed: dict[bytes, Exact] = {}
        self.known: set[bytes] = set()
        self.on_devices: set[bytes] = set()
        self.made: dict[int, Event] = {}
        self._explanations: dict[int, str | None] = {}
        self._masks: dict[int, bool] = {}
        self._of_blocks: dict[int, bool] = {}
        self._blocks: dict[tuple[int, ...], set[bytes]] = {}
        self._passed: list[Exact] = []
        self.near = record.find_device_readers()
        self._note_reference()
        self._note_mesh()

    def _note_reference(self) -> None:
        """Notes the values of the reference, and which of them are more than elements of inputs."""
        passed: set[int] = set()  # the ids of values that are elements of inputs alone
        for event in self.reference.events:
            for x in event.operands:
                is_input = id(x) not in self.reference.maker
                if is_input:
                    passed.add(id(x))
            moves = event.call.primitive in _MOVES
            if moves and passed.issuperset(map(id, event.operands)):
                passed.update(map(id, event.results))
            for x in (*event.operands, *event.results):
                if is_number(x):
                    self._note_number(x, event.call.axes, is_passed=id(x) in passed)

    def _note_number(self, x: Operand, axes: Mapping[str, int], is_passed: bool) -> None:
        """Notes a number of the reference; `is_passed` says whether it is elements of inputs alone."""
        residues = take_residues(self.field, x)
        self.known.add(digest(residues))
        if self.field.compiled:
            self._note_layouts(residues, axes)
        if not isinstance(x, Exact):
            return
        if is_passed:
            self._passed.append(x)
        elif not _is_constant(residues):
            self.computed.setdefault(digest(residues), x)

    def _note_layouts(self, residues: np.ndarray, axes: Mapping[str, int]) -> None:
        """Notes a value in other orders of its dims too, in which a compiler may keep it."""
        if not _has_devices(residues, axes):  # a literal, or what goes into a shard_map
            axes = {}
        rank = len(axes)
        dims = range(residues.ndim)
        lead = tuple(dims[: 1 + rank])
        dims_of_array = tuple(dims[1 + rank :])
        orders = [dims_of_array]
        if len(dims_of_array) <= _MOST_DIMS:
            orders = list(itertools.permutations(dims_of_array))
        # Of x [8, 3] at 2 points: the residues [2, 8, 3] and [2, 3, 8].
        for order in orders:
            layout = residues.transpose(lead + order)
            self.known.add(digest(layout))
            if axes:
                self.on_devices.add(digest(_spread(layout, axes)))

    def _note_mesh(self) -> None:
        """Notes the inputs on the mesh, and for each number there the equation that made it."""
        for event in self.record.events:
            for x in event.operands:
                if isinstance(x, Exact) and id(x) not in self.made:
                    self.known.add(digest_value(self.field, x))
            is_collective = kind_of(event.call.equation) is not None
            for x in event.results:
                # A sum over devices may be a number without an input, as a count of tokens.
                is_sum = is_collective and is_number(x)
                if isinstance(x, Exact) or is_sum:
                    self.made.setdefault(id(x), event)

    def explain(self, x: Operand) -> str | None:
        """In which form the reference has a value: "" as it is, whole or split over devices; None if it does not.

        Worked example: of `psum(x_f @ w_f, "tp")` the product x_f @ w_f is that of the reference " summed over 'tp'".
        """
        # `made` has the numbers that equations on the mesh gave. Any other value is an input, which both programs have;
        # or an integer or a mask, which the reference has unless it follows from a number that the reference lacks.
        if id(x) not in self.made:
            return None if self.follows_unknown(x) else ""
        if id(x) not in self._explanations:
            self._explanations[id(x)] = self._explain_number(x, self.made[id(x)])
        return self._explanations[id(x)]

    def _explain_number(self, x: Operand, event: Event) -> str | None:
        """In which form the reference has a number that an equation made."""
        passes_on = event.call.primitive in ("scan", "ppermute")
        if passes_on and all(self.explain(operand) is not None for operand in event.operands):
            return ""
        axes = event.call.axes
        if self.on_devices:
            residues = take_residues(self.field, x)
            if _has_devices(residues, axes) and digest(_spread(residues, axes)) in self.on_devices:
                return ""
        return self.describe_form(x, axes, self.known)

    def follows_unknown(self, x: Operand) -> bool:
        """Whether a mask or an integer follows from a number that the reference does not have."""
        number = self.record.maker.get(id(x))
        if isinstance(x, Exact) or number is None:
            return False
        if id(x) not in self._masks:
            event = self.record.events[number]
            unknown = any(self.explain(operand) is None for operand in event.operands)
            self._masks[id(x)] = unknown and not self._is_known_integer(x, event)
        return self._masks[id(x)]

    def _is_known_integer(self, x: Operand, event: Event) -> bool:
        """Whether the reference has an integer too, which a compiler may compute in another way."""
        if not self.field.compiled or x.dtype.kind not in "iu":
            return False
        return self.describe_form(x, event.call.axes, self._integers) == ""

    def describe_form(self, x: Operand, axes: Mapping[str, int], known: Container[bytes]) -> str | None:
        """How a value of the mesh must be put together to be a known one."""
        for form, words in list_forms(self.field, x, axes):
            if digest(form) in known:
                return words
        return None

    @cached_property
    def _integers(self) -> set[bytes]:
        """The digests of the integers of the reference; masks are too often alike."""
        digests: set[bytes] = set()
        for event in self.reference.events:
            for x in event.results:
                if not is_number(x) and x.dtype.kind in "iu":
                    digests.add(digest_value(self.field, x))
        return digests

    def find_sum(self, x: Operand, axes: Mapping[str, int]) -> Call | None:
        """The sum over devices of the reference that a value lacks; None if it lacks none.

        Worked example: the reference has `y = psum(p, "tp")`. A value whose sum over 'tp' is y lacks that psum.
        """
        for form, words in list_forms(self.field, x, axes):
            call = self._sums.get(digest(form))
            if words and call is not None:
                return call
        return None

    @cached_property
    def _sums(self) -> dict[bytes, Call]:
        """What a reference with a shard_map of its own sums over devices, by digest."""
        sums: dict[bytes, Call] = {}
        for event in self.reference.events:
            if kind_of(event.call.equation) != "all_reduce":
                continue
            for x in event.results:
                for form in self._list_unsummed(x, event.call.axes):
                    sums.setdefault(digest(form), event.call)
        return sums

    def _list_unsummed(self, x: Operand, axes: Mapping[str, int]) -> Iterator[np.ndarray]:
        """The arrays to which a value of the mesh may be put together, but for sums over devices."""
        for form, words in list_forms(self.field, x, axes):
            if not words:
                yield form

    # Blocks

    def is_of_blocks(self, x: Operand) -> bool:
        """Whether a value that the reference does not have is right in an algorithm of blocks.

        Each device has some block of a value of the reference, or a device computed it of such blocks alone.
        """
        event = self.made.get(id(x))
        if event is None or len(event.results) != 1:
            return False
        if id(x) not in self._of_blocks:
            self._of_blocks[id(x)] = False  # while it is found out
            self._of_blocks[id(x)] = self._has_blocks(x, event) or self._is_local(event)
        return self._of_blocks[id(x)]

    def _has_blocks(self, x: Operand, event: Event) -> bool:
        """Whether each device has a block of some value of the reference: of a ring, others in each round."""
        rank = len(event.call.axes)
        residues = take_residues(self.field, x)
        if not rank or _is_constant(residues):
            return False
        shape = residues.shape[1 + rank :]
        if shape not in self._blocks:
            self._blocks[shape] = self._digest_blocks(shape)
        blocks = self._blocks[shape]
        return all(piece in blocks for piece in _digest_pieces(residues, rank))

    def _digest_blocks(self, shape: tuple[int, ...]) -> set[bytes]:
        """The digests of all blocks of a shape that values of the reference consist of."""
        values = list(self.computed.values())
        # A compiler cuts inputs, too, where a kernel would get its piece.
        if self.field.compiled:
            values += self._passed
        blocks: set[bytes] = set()
        for value in values:
            residues = take_residues(self.field, value)
            blocks.update(map(digest, list_blocks(residues, shape)))
        return blocks

    def _is_local(self, event: Event) -> bool:
        """Whether a device computed a value of its blocks alone, of which one equation mixed the elements.

        Worked example: in attention by blocks of keys, `m = scores.max(-1)` is the largest score of a device's block.
        No program for one device has it, but the scores are a block of those of the reference: m is local. And so is
        `exp(scores - m)`, which reads m and a block.
        """
        if kind_of(event.call.equation) == "all_gather":
            return all(self.is_of_blocks(x) for x in event.operands)
        [result] = event.results
        if self.record.maker.get(id(result)) in self.near:
            return False
        devices = result.shape[: len(event.call.axes)]
        if max(devices, default=1) == 1:
            return False  # all devices have the same
        # As long as all that is unknown is of blocks, so is the result.
        unknown = [x for x in event.operands if self.explain(x) is None]
        # What mixes elements of a value that the reference has gives a value of the block alone.
        if not unknown and event.call.primitive not in _MIXES:
            return False
        return all(self.is_of_blocks(x) for x in unknown)

    # Operands

    def find_misread(self, event: Event) -> Call | None:
        """What made the one operand of an equation that the reference's equation has another for.

        That other value must be nowhere in the program on the mesh: else the wrong one of its values is read, and the
        mistake is the equation's.

        Worked example: the differences a - b and c - d of the reference, and a - d on the mesh, which has c too. It
        should read c. That the reference has a - b, and nobody b, says nothing of d.
        """
        operands = event.operands
        if len(operands) < 2 or len(event.results) != 1:
            return None
        forms = [self._digest_forms(x, event.call.axes) for x in operands]
        misread = None
        for other in self.reference.events:
            is_alike = other.call.name == event.call.name and len(other.operands) == len(operands)
            if not is_alike:
                continue
            missing = self._list_missing(other.operands, forms)
            if len(missing) != 1:
                continue
            [number] = missing
            x = other.operands[number]
            if not is_number(x):
                continue
            if digest_value(self.field, x) in self._digests_on_mesh:
                return None
            if misread is None:
                misread = operands[number]
        if misread is None:
            return None
        return self.find_origin(misread, _SENT)

    def _list_missing(self, operands: Sequence[Operand], forms: Sequence[set[bytes]]) -> list[int]:
        """The numbers of the operands of an equation of the reference that an equation on the mesh does not have.

        `forms` has for each operand of the latter the digests of the arrays to which it may be put together.
        """
        missing = []
        for number, x in enumerate(operands):
            has_operand = is_number(x) and digest_value(self.field, x) in forms[number]
            if not has_operand:
                missing.append(number)
        return missing

    def _digest_forms(self, x: Operand, axes: Mapping[str, int]) -> set[bytes]:
        """The digests of the arrays to which a value may be put together, but for sums; none of integers and masks."""
        if not is_number(x):
            return set()
        return {digest(form) for form in self._list_unsummed(x, axes)}

    @cached_property
    def _digests_on_mesh(self) -> set[bytes]:
        """The digests of all arrays to which some value of the mesh may be put together.

        A value of the reference whose digest is not among them is nowhere in the program on the mesh.
        """
        digests: set[bytes] = set()
        for event in self.record.events:
            values = event.results
            # Operands of a shard_map have other dims in front.
            if event.call.primitive != "shard_map":
                values = (*event.operands, *event.results)
            for x in values:
                digests |= self._digest_forms(x, event.call.axes)
        return digests

    def find_origin(self, x: Operand, passing: Sequence[str] = ()) -> Call | None:
        """The equation that made a value: those that only passed it on, as a reshape does, do not count."""
        number = self.record.maker.get(id(x))
        while number is not None:
            event = self.record.events[number]
            if event.call.primitive not in (*PASS, *passing):
                return event.call
            makers = self.record.find_makers(event.operands)
            number = makers[0] if makers else None
        return None

    # Doubts

    def list_doubts(self, got: Operand) -> dict[int, float]:
        """For events before a value how unlikely the mistake is there: of those with results that the reference has.

        If it has a value, all events that led to the value are probably right, too. Worked example: `h = x @ w; y =
        psum(h); z = y / 4`, where the reference has y. Then the mistake is hardly in the psum or the product: {0: 3.0,
        1: 3.0}, by their numbers, and nothing for the division.

        Where the wrong result is itself a value of the reference, as a gradient at the old weights in place of the new
        ones, that tells nothing of what led to it.
        """
        causes = self.record.find_causes([got])
        known_on_one: set[int] = set()
        known_on_all: set[int] = set()
        for number in causes:
            event = self.record.events[number]
            if not self._varies(event):
                continue
            if self._is_known_on_one(event):
                known_on_one.add(number)
            if self._is_known_on_all(event):
                known_on_all.add(number)
        if known_on_all.issuperset(self.record.find_makers([got])):
            return {}
        doubts = dict.fromkeys(self._add_causes(known_on_one), KNOWN_ON_ONE)
        doubts.update(dict.fromkeys(self._add_causes(known_on_all), KNOWN))
        return doubts

    def _add_causes(self, numbers: set[int]) -> set[int]:
        """The numbers of events, and of those from which all of their results follow."""
        operands: list[Operand] = []
        for number in numbers:
            event = self.record.events[number]
            # Of a slice that is known the other elements may be wrong.
            if event.call.name not in _PARTS:
                operands += event.operands
        return numbers | self.record.find_causes(operands, _PARTS)

    def find_last_known(self, got: Operand, doubts: Mapping[int, float]) -> set[int]:
        """The numbers of the events in doubt whose results are read where there is none."""
        last: set[int] = set()
        for number in self.record.find_causes([got]):
            if number not in doubts:
                last.update(self.record.find_makers(self.record.events[number].operands))
        return last

    def _varies(self, event: Event) -> bool:
        """Whether an equation gave one array that follows from an input."""
        if len(event.results) != 1 or not event.operands:
            return False
        [result] = event.results
        return isinstance(result, Exact) and not _is_constant(take_residues(self.field, result))

    def _is_known_on_one(self, event: Event) -> bool:
        """Whether the reference has the array that an equation gave on one of the devices."""
        [result] = event.results
        residues = take_residues(self.field, result)
        return any(piece in self.computed for piece in _digest_pieces(residues, len(event.call.axes)))

    def _is_known_on_all(self, event: Event) -> bool:
        """Whether the reference has the array that an equation gave, of all devices together."""
        [result] = event.results
        return self.describe_form(result, event.call.axes, self.computed) == ""


def _is_constant(residues: np.ndarray) -> bool:
    """Whether an array is the same at all points, so that it follows from no input."""
    return bool((residues == residues[:1]).all())


def _digest_pieces(residues: np.ndarray, rank: int) -> Iterator[bytes]:
    """The digest of what each device has, of an array [points, *axes, ...] with so many axes."""
    for device in np.ndindex(*residues.shape[1 : 1 + rank]):
        yield digest(residues[(slice(None), *device)])


def _has_devices(residues: np.ndarray, axes: Mapping[str, int]) -> bool:
    """Whether there is a dim for each axis behind the points."""
    sizes = residues.shape[1 : 1 + len(axes)]
    if len(sizes) != len(axes):
        return False
    return all(size in (1, n) for size, n in zip(sizes, axes.values(), strict=True))


def _spread(residues: np.ndarray, axes: Mapping[str, int]) -> np.ndarray:
    """[points, *axes, ...]: the values of all devices, a row for each, also where all along an axis have the same."""
    points = len(residues)
    shape = residues.shape[1 + len(axes) :]
    return np.broadcast_to(residues, (points, *axes.values(), *shape))
