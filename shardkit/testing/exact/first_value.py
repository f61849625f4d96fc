"""The first value of a wrong program that the reference does not have, for a message where no repair is found.

From the wrong result the way goes backwards, through values that the reference does not have, to the equations that
read only values that it has. One with a partial sum as an operand is named, else the first.

Worked example: the kernel `tanh(psum(x @ w, "tp") / 2) + 1`, the reference `tanh(x @ w) + 1`.

    add, tanh, div      the reference does not have their results
    psum                "x @ w" of the reference
    the message         The first value that the reference does not have is that of div at kernel.py:3

An algorithm of blocks computes values that no program for one device has, as the largest number of a block. They are no
mistakes, and are passed over.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import numpy as np

from shardkit._jax.jaxprs import kind_of
from shardkit.testing.exact.forms import digest, list_forms, list_ratios, multiply_residues
from shardkit.testing.exact.known_values import KNOWN, PASS, KnownValues
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.record import Event
from shardkit.testing.exact.repairs import Call, is_integer, is_mask
from shardkit.testing.exact.rules.operands import Operand

# How many equations are followed, from a partial sum to the missing sum, or from a value to the loop that gives it.
_MOST_BEHIND = 4


class FirstValue:
    """Finds and describes the first value that the reference does not have.

    Attributes:
        values: the values of both runs.
        got: the wrong result, or the value that differs between devices.
        doubts: how unlikely it is that the mistake is at an event, by the number of the event.
        differs_between_devices: whether `got` is a value that differs between devices.
    """

    def __init__(
        self, values: KnownValues, got: Operand, doubts: Mapping[int, float], *, differs_between_devices: bool
    ):
        self.values = values
        self.record = values.record
        self.got = got
        self.doubts = doubts
        self.differs_between_devices = differs_between_devices

    def describe(self, relation: str, reference_is_zero: bool) -> str:
        """The end of a message: the relation of the result to the reference's, and the first value.

        Worked example: ": it is 1/2 of the reference everywhere. The first value that the reference does not have is
        that of div at kernel.py:4, of a value that is the reference's only summed over 'tp'".

        Args:
            relation: how the result differs, in words; "" if that is not known.
            reference_is_zero: whether the reference's result is zero, so that all values are unknown to it.
        """
        first = None if reference_is_zero else self.find()
        if first is None:
            return _begin(relation) + self._describe_origin()
        # An equation may be right, and read a wrong value: then the mistake is where that value was made.
        source = self.values.find_misread(first)
        if source is not None and source.line != first.call.line:
            return (
                f"{_begin(relation)}. The mistake is at {source.line}: {first.call} reads the {source.name} of that "
                "line where the reference has another value"
            )
        sentence = _name_first(first)
        factor = relation or describe_factor(self.values, first)
        # Without a factor it is likelier that a mask or an integer is wrong, by which the equation chose.
        if not factor:
            mask = self._find_mask(first)
            if mask is not None:
                return f". {sentence}, which reads {mask}"
        end = self._describe_partial_sum(first)
        origin = self.values.find_origin(self.got)
        if relation and str(origin) != str(first.call):
            end += f"; the result comes from {origin}"
        return f"{_begin(factor)}. {sentence}{end}"

    def _describe_origin(self) -> str:
        """The equation that made the wrong result, in words; "" if the result is an argument."""
        origin = self.values.find_origin(self.got)
        if origin is None:
            return ""
        return f"; it comes from {origin}"

    def has_lost_sum(self) -> bool:
        """Whether a sum over devices of the reference is missing. Only a compiled program can lose one."""
        return False

    def find(self) -> Event | None:
        """The first equation whose result the reference does not have; None if it has those of all equations."""
        first = self._select_entry(self._is_known)
        if first is None:
            return None
        is_of_blocks = any(self.values.is_of_blocks(x) for x in first.results)
        if not is_of_blocks:
            return first
        behind_blocks = self._select_entry(self._is_known_by_blocks)
        return behind_blocks or first

    def _is_known(self, x: Operand) -> bool:
        """Whether the reference has a value, whole or split over devices."""
        return self.values.explain(x) is not None

    def _is_known_by_blocks(self, x: Operand) -> bool:
        """Whether the reference has a value, or its blocks."""
        return self._is_known(x) or self.values.is_of_blocks(x)

    def _select_entry(self, is_known: Callable[[Operand], bool]) -> Event | None:
        """Of the equations that lead from known values to unknown ones, one with a partial sum, else the first."""
        entries = []
        for event in self._list_entries(is_known):
            is_doubtful = self.doubts.get(event.number, 0.0) >= KNOWN
            # The line of a shard_map is the library's own.
            if not is_doubtful and event.call.primitive != "shard_map":
                entries.append(event)
        if not entries:
            return None

        # False comes before True: an equation that reads a partial sum comes before all others.
        def rank(event: Event) -> tuple[bool, int]:
            reads_partial_sum = any(self.values.explain(x) for x in event.operands)
            return not reads_partial_sum, event.number

        return min(entries, key=rank)

    def _list_entries(self, is_known: Callable[[Operand], bool]) -> list[Event]:
        """The equations of which all operands are known and a result is not, on the way back from the wrong result.

        Worked example: `y = psum(x @ w, "tp"); z = y / 2; return tanh(z)`, of which y is known, and z and tanh(z) are
        not. Behind tanh(z) stands the division; all that it reads is known, so it is an entry.
        """
        entries: list[Event] = []
        waiting = [self.got]
        visited: set[int] = set()
        while waiting:
            x = waiting.pop()
            if id(x) in visited or is_known(x):
                continue
            visited.add(id(x))
            # An unknown value that no equation made is an argument.
            event = self._find_maker(x)
            if event is None:
                continue
            unknown = [operand for operand in event.operands if not is_known(operand)]
            if not unknown:
                entries.append(event)
            waiting += self._select_causes(unknown)
        return entries

    def _select_causes(self, unknown: list[Operand]) -> list[Operand]:
        """Of the unknown operands of an equation those that may have made its result wrong."""
        if not self.differs_between_devices:
            return unknown
        # The reason of a difference between devices is an operand that differs between them, too.
        varying = [x for x in unknown if self._varies(x)]
        return varying or unknown

    def _varies(self, x: Operand) -> bool:
        """Whether devices may have different values."""
        event = self._find_maker(x)
        if event is None:
            return False
        rank = len(event.call.axes)
        return max(x.shape[:rank], default=1) > 1

    def _find_maker(self, x: Operand) -> Event | None:
        """The event that made a value; None for an argument."""
        number = self.record.maker.get(id(x))
        if number is None:
            return None
        return self.record.events[number]

    def _describe_partial_sum(self, event: Event) -> str:
        """The operand of an equation that is only a partial sum, in words; "" if there is none."""
        for x in event.operands:
            words = self.values.explain(x)
            if words:
                return f", of a value that is the reference's only{words}"
        return ""

    def _find_mask(self, event: Event) -> Call | None:
        """The equation of the mask or the integers that an equation reads; None if it reads numbers alone."""
        for x in event.operands:
            if isinstance(x, Exact):
                continue
            maker = self._find_maker(x)
            while maker is not None:
                passes_on = maker.call.primitive in (*PASS, "select_n")
                if maker.operands and not passes_on:
                    return maker.call
                # Backwards, by the first operand that an equation made.
                numbers = self.record.find_makers(maker.operands)
                maker = self.record.events[numbers[0]] if numbers else None
        return None


class FirstValueOfCompiled(FirstValue):
    """Finds and describes the first such value of a compiled program.

    A compiler merges and splits equations, so that few values are alike. Most mistakes of a compiler are sums that it
    dropped: they are looked for first. Integers and loops are named, too, because a group of wrong devices or a loop
    with too few rounds is seen there.
    """

    def __init__(
        self, values: KnownValues, got: Operand, doubts: Mapping[int, float], *, differs_between_devices: bool
    ):
        super().__init__(values, got, doubts, differs_between_devices=differs_between_devices)
        self._masks: dict[int, bool] = {}

    def describe(self, relation: str, reference_is_zero: bool) -> str:
        """The end of a message: the relation of the result to the reference's, and the first value."""
        beginning = _begin(relation)
        first = None if reference_is_zero else self.find()
        if first is None:
            end = self._describe_origin()
            lost = self._find_lost_sum(self.got)
            if lost is not None:
                end += f"; it is a sum without that of {lost}"
            return beginning + end
        sentence = _name_first(first)
        loop = self._describe_loop(first)
        lost = self._find_lost_sum_of(first)
        if lost is not None:
            return f"{beginning}. {sentence}, of a sum without that of {lost}{loop}"
        integers = self._describe_integers(first)
        partial_sum = self._describe_partial_sum(first)
        return f"{beginning}. {sentence}{integers}{partial_sum}{loop}"

    def _describe_integers(self, event: Event) -> str:
        """The mask or integers that an equation reads, and those from which they follow, in words; "" if none."""
        mask = self._find_mask(event)
        if mask is None:
            return ""
        words = ""
        if mask.line != event.call.line:
            words += f", which reads {mask}"
        origin = self._find_integers(event, mask.line)
        if origin is not None and origin.line != event.call.line:
            words += f", of integers from {origin}"
        return words

    def has_lost_sum(self) -> bool:
        """Whether a sum over devices of the reference is missing."""
        first = self.find()
        if first is None:
            return self._find_lost_sum(self.got) is not None
        return self._find_lost_sum_of(first) is not None

    def _is_known_by_blocks(self, x: Operand) -> bool:
        """Whether the reference has a value, or its blocks, or all values from which a mask follows."""
        if super()._is_known_by_blocks(x):
            return True
        maker = self._find_maker(x)
        if isinstance(x, Exact) or maker is None:
            return False
        if id(x) not in self._masks:
            self._masks[id(x)] = all(self._is_known_by_blocks(operand) for operand in maker.operands)
        return self._masks[id(x)]

    # Sums that are missing

    def _find_lost_sum_of(self, event: Event) -> Call | None:
        """The sum of the reference that is missing in an operand of an equation; None if none is."""
        for x in event.operands:
            if self._is_made(x):
                lost = self._find_lost_sum(x)
                if lost is not None:
                    return lost
        return None

    def _find_lost_sum(self, x: Operand) -> Call | None:
        """The sum over devices of the reference whose partial sums a value has, or a value a few equations before.

        Worked example: the traced program has `y = psum(x @ w, "tp")` and then `y + b`, the compiled one adds b to its
        product. Summed over 'tp' that product is y: the psum of the traced program is missing.
        """
        for _ in range(_MOST_BEHIND):
            event = self._find_maker(x)
            if event is None:
                return None
            call = self.values.find_sum(x, event.call.axes)
            if call is not None:
                return call
            # Before a collective the values are those of single devices.
            if kind_of(event.call.equation):
                return None
            numbers = [operand for operand in event.operands if self._is_made(operand)]
            if not numbers:
                return None
            x = numbers[0]
        return None

    def _is_made(self, x: Operand) -> bool:
        """Whether a value is a number that an equation of the program on the mesh made."""
        return isinstance(x, Exact) and id(x) in self.record.maker

    # Loops and integers

    def _describe_loop(self, event: Event) -> str:
        """The loop around an equation, or a few equations before it, in words; "" if there is none."""
        line = self._find_line_of_loop(event)
        if line:
            return f", in the loop at {line}" if line != event.call.line else ""
        # Backwards, the nearest equations first: the list grows while it is read.
        waiting = self.record.find_makers(event.operands)
        for number in itertools.islice(waiting, _MOST_BEHIND):
            maker = self.record.events[number]
            line = self._find_line_of_loop(maker)
            if line:
                return f", of what the loop at {line} gives"
            waiting += self.record.find_makers(maker.operands)
        return ""

    def _find_line_of_loop(self, event: Event) -> str:
        """The line of the loop around an equation; "" if there is none."""
        return self.record.loops.get(id(event.call.equation), "")

    def _find_integers(self, event: Event, line: str) -> Call | None:
        """The equation of another line from whose integers the masks of an equation follow, as a key or a place."""
        # Backwards, as in `_describe_loop`: the list grows while it is read.
        waiting = self._find_makers_of_integers(event)
        visited = set(waiting)
        for number in waiting:
            maker = self.record.events[number]
            if maker.call.line != line and maker.operands and maker.call.primitive not in PASS:
                return maker.call
            for behind in self._find_makers_of_integers(maker):
                if behind not in visited:
                    visited.add(behind)
                    waiting.append(behind)
        return None

    def _find_makers_of_integers(self, event: Event) -> list[int]:
        """The numbers of the events that made the integers and masks that an equation reads."""
        integers = [x for x in event.operands if is_integer(x) or is_mask(x)]
        return self.record.find_makers(integers)


def describe_factor(values: KnownValues, event: Event) -> str:
    """The factor by which the result of an equation is no value of the reference, in words; "" if there is none."""
    forms: list[tuple[np.ndarray, str]] = []
    for x in event.results:
        if id(x) in values.made:  # a mask has no factor
            forms += list_forms(values.field, x, event.call.axes)
    for ratio, text in list_ratios(event.call.axes):
        for form, words in forms:
            # Without the factor it would be a value of the reference.
            corrected = multiply_residues(values.field, form, 1 / ratio)
            if digest(corrected) in values.known:
                return f"it is {text} a value of the reference{words}"
    return ""


def _name_first(event: Event) -> str:
    """The beginning of the sentence that names the first value."""
    return f"The first value that the reference does not have is that of {event.call}"


def _begin(words: str) -> str:
    """The words after a colon; "" if there are none."""
    return f": {words}" if words else ""
