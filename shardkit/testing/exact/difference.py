"""From a wrong result to a sentence: how the result differs, and which line is the mistake.

Both programs run once more, and every value is kept. `search.py` looks for repairs that make the result right, and
`remedies.py` says which of these is the likeliest mistake. Where no repair is found, `first_value.py` names the first
value that the reference does not have.

Worked example: on data=2, `psum(x, "data") / 4` where the reference is the mean of two.

    the result      it is 1/2 of the reference everywhere
    a remedy        div times 2: the result is right
    the message     ...: it is 1/2 of the reference everywhere. The mistake is at kernel.py:3: with div times 2, the
                    size of 'data', it is right
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shardkit._arguments.checks import quote
from shardkit.testing.exact.first_value import FirstValue, FirstValueOfCompiled, describe_factor
from shardkit.testing.exact.forms import list_ratios, multiply_residues, take_residues
from shardkit.testing.exact.known_values import KnownValues
from shardkit.testing.exact.memory import StepMemory
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.orders import find_equal
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.pieces import DiffersError
from shardkit.testing.exact.record import Event, Record
from shardkit.testing.exact.remedies import RemedyChoice
from shardkit.testing.exact.rules.operands import Operand, lift_operand
from shardkit.testing.exact.search import Remedy, Runs, Search


def describe_difference(runs: Runs, index: int, expected: Exact | None) -> str:
    """Where and how a result differs, as the end of a sentence.

    Args:
        runs: both programs, in a field in which they differ.
        index: the number of the result.
        expected: the result of the reference; None if a value of the program on the mesh differs between devices.
    """
    return _examine(runs, index, expected).describe()


def describe_remedy(runs: Runs, index: int, expected: Exact | None) -> str:
    """The line of the mistake and its repair, as a sentence; "" if no repair is found."""
    return _examine(runs, index, expected).describe_remedy()


def _examine(runs: Runs, index: int, expected: Exact | None) -> _Difference:
    """Runs both programs once more, and keeps all their values."""
    reference = Record()
    record = Record()
    expected_results = runs.alone(runs.field, reference)
    memory = StepMemory()
    runs.field.memory = memory
    try:
        result = runs.on_mesh(runs.field, record)[index]
    except DiffersError as error:
        # There is no result: what differs between devices is looked for in its place.
        result = error.value
    finally:
        # From here on the memory only recalls: a repaired run computes what its repair changes.
        memory.close()
    values = KnownValues(runs.field, reference, record)
    index_of_expected = None if expected is None else index
    search = Search(runs, record, result, expected_results, index_of_expected)
    return _Difference(values, search, result, expected)


class _Relation(NamedTuple):
    """How a wrong result follows from the reference's.

    Attributes:
        words: as "it is 2 times the reference everywhere"; "" if no relation is known.
        reference_is_zero: whether the reference's result is zero, so that no factor makes the result right.
    """

    words: str
    reference_is_zero: bool = False


class _Difference:
    """What a message says of a wrong result.

    Attributes:
        values: the values of both runs.
        search: the search for a repair.
        result: the wrong result, or the value that differs between devices.
        expected: the result of the reference; None for a value that differs between devices.
        field: the arithmetic.
    """

    def __init__(self, values: KnownValues, search: Search, result: Operand, expected: Exact | None):
        self.values = values
        self.search = search
        self.result = result
        self.expected = expected
        self.field = values.field
        doubts = values.list_doubts(result)
        self._choice = RemedyChoice(values, search, result, doubts)
        # Of a compiled program no equation is like one of the reference, so that other things are said of its values.
        kind = FirstValueOfCompiled if self.field.compiled else FirstValue
        self._first_value = kind(values, result, doubts, differs_between_devices=expected is None)

    def describe(self) -> str:
        """How the result differs, and the line of the mistake."""
        relation = self._find_relation()
        places = "" if relation.words else self._describe_places()
        remedies = []
        # A sum of the reference that is missing is likelier than a repair of another equation.
        if not relation.reference_is_zero and not self._first_value.has_lost_sum():
            remedies = self._choice.find()
        if not remedies:
            return places + self._first_value.describe(relation.words, relation.reference_is_zero)
        words = relation.words or self._describe_factor_of(remedies)
        if words:
            places += f": {words}"
        return f"{places}. {self._choice.describe(remedies)}"

    def describe_remedy(self) -> str:
        """The line of the mistake, and its repair; "" if no repair is found."""
        remedies = self._choice.find()
        if not remedies:
            return ""
        return self._choice.describe(remedies)

    def _find_relation(self) -> _Relation:
        """How the result follows from the reference's, or how its pieces make up a value of the reference."""
        words = self.values.explain(self.result)
        if words:
            return _Relation(f"only{words} it is a value of the reference")
        if self.expected is None:
            return _Relation("")
        return _relate(self.field, self.result, self.expected)

    def _describe_places(self) -> str:
        """The devices, or the elements, at which alone a result differs; "" if it differs on all of them.

        Worked example: a result [8, 3] under P("data") on data=4, of which the rows 4 and 5 differ. They are those of
        device 2: ", only where 'data' is 2".
        """
        if self.expected is None or self.result.shape != self.expected.shape:
            return ""
        is_wrong = ~find_equal(self.field, lift_operand(self.field, self.result), self.expected)
        sentences = []
        for dim, axes in enumerate(self._find_split_axes(is_wrong.ndim)):
            other_dims = tuple(other for other in range(is_wrong.ndim) if other != dim)
            wrong_rows = np.flatnonzero(is_wrong.any(other_dims)).tolist()
            words = _describe_rows(wrong_rows, is_wrong.shape[dim], dim, axes)
            if words:
                sentences.append(words)
        if not sentences:
            return ""
        return f", only {' and '.join(sentences)}"

    def _find_split_axes(self, rank: int) -> list[dict[str, int]]:
        """The axes that split each dim of the result, with their sizes.

        Worked example: a result [8, 3] under P("data") on data=4: [{"data": 4}, {}].
        """
        axes_by_dim: list[dict[str, int]] = [{} for _ in range(rank)]
        number = self.values.record.maker.get(id(self.result))
        if number is None:
            return axes_by_dim
        events = self.values.record.events
        call = events[number].call
        if call.primitive != "shard_map":
            return axes_by_dim
        # The interpreter tells of a shard_map's results one by one, in the order of their specs.
        specs = call.equation.params["out_specs"]
        position = sum(event.call is call for event in events[:number])
        spec = specs[position % len(specs)]
        sizes = call.equation.params["mesh"].shape
        for dim, entry in enumerate(tuple(spec)[:rank]):
            # An entry of a spec is a name, some names, or None.
            names = (entry,) if isinstance(entry, str) else entry or ()
            axes_by_dim[dim] = {name: sizes[name] for name in names}
        return axes_by_dim

    def _describe_factor_of(self, remedies: list[Remedy]) -> str:
        """The factor by which a repaired value is wrong, of the likeliest repair for which one is known; else ""."""
        for remedy in (self._choice.choose(remedies), *remedies):
            event = self.values.record.events[remedy.number]
            if self._is_unknown(event):
                factor = describe_factor(self.values, event)
                if factor:
                    return factor
        return ""

    def _is_unknown(self, event: Event) -> bool:
        """Whether an equation gave numbers that the reference does not have."""
        return all(isinstance(x, Exact) and self.values.explain(x) is None for x in event.results)


def _describe_rows(rows: Sequence[int], size: int, dim: int, axes: Mapping[str, int]) -> str:
    """The devices, or the places along a dim of that size, that have these rows; "" if all have some."""
    if not axes:
        if len(rows) == size:
            return ""
        return f"at {_list_numbers(rows)} of dim {dim}"
    count = math.prod(axes.values())
    # Row 5 of 8 over four devices is on device 5 * 4 // 8 = 2.
    devices = sorted({row * count // size for row in rows})
    if len(devices) == count:
        return ""
    return f"where {quote(axes)} is {_list_numbers(devices)}"


def _list_numbers(numbers: Sequence[int]) -> str:
    """Numbers in words: "0 or 2"; "0 to 2" for consecutive ones."""
    are_consecutive = numbers[-1] - numbers[0] == len(numbers) - 1
    if len(numbers) > 2 and are_consecutive:
        return f"{numbers[0]} to {numbers[-1]}"
    return " or ".join(map(str, numbers))


def _relate(field: Field, result: Operand, expected: Exact) -> _Relation:
    """How a result differs: by a factor, or in the order of its pieces.

    Worked example, modulo 7: where (3, 5) is expected and the result is (6, 3), it is 2 times the reference everywhere.
    """
    residues = take_residues(field, result)
    expected_residues = take_residues(field, expected)
    if residues.shape != expected_residues.shape:
        return _Relation("")
    if not expected_residues.any():
        return _Relation("the reference's is zero", reference_is_zero=True)
    if not residues.any():
        return _Relation("it is zero")
    for ratio, ratio_in_words in list_ratios({}):
        if np.array_equal(residues, multiply_residues(field, expected_residues, ratio)):
            return _Relation(f"it is {ratio_in_words} the reference everywhere")
    # Dim 0 has the points.
    for dim in range(1, expected_residues.ndim):
        for distance in range(1, expected_residues.shape[dim]):
            if np.array_equal(residues, np.roll(expected_residues, distance, dim)):
                words = f"it is the reference rolled by {distance} along dim {dim - 1}"
                return _Relation(f"{words}: devices have each other's pieces")
    return _Relation("")
