"""The certificate of a proof: the statement, how sure it is, what was seen of comparisons, and what is assumed.

Worked example, of a kernel over data=2 that clips its gradient:

    equal for all inputs: kernel and reference, mesh data=2, values and gradients
    inputs: float32[8, 4]
    3 points; the chance that a difference on the branches of the first draw was missed is at most 2e-24
    no function is uninterpreted
    comparisons: at 1 line, both ways in 8 draws of real inputs
    assumed: numbers are real and inputs finite: ...
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from shardkit.testing.exact.evidence import Evidence

# What every proof assumes.
ASSUMED = (
    "numbers are real and inputs finite: nothing is said about rounding, overflow, the compiler, second derivatives, "
    "or inputs for which a divisor or the argument of a logarithm is zero",
    "integers, booleans, keys and all arrays that a function closes over are as they were",
    "a float constant is the simplest rational that rounds to it",
    "constants beyond 1e9 and -1e9 are infinite",
    "functions of different arguments have independent values",
)
# What a proof assumes besides of programs that compare floats.
SAMPLED = "what hangs on several comparisons at once is seen as far as draws show it; gradients, where inputs differ"
# And where logarithms are multiplied.
POSITIVE = "logarithms are of positive numbers"


class Equality(NamedTuple):
    """A certificate: the statement, and how sure it is. `print` shows it as text, `to_json` as JSON.

    Attributes:
        what: the two sides, and their mesh.
        shapes: dtype and shape of each input.
        points: the number of random points of the field.
        chance: a bound of the probability that two different sides agree at all points.
        uninterpreted: functions without a law: the proof knows only that equal arguments give equal values.
        compared: the comparisons, with the line of each one that went only one way; empty if there are none.
        assumed: the assumptions.
    """

    what: str
    shapes: tuple[str, ...]
    points: int
    chance: float
    uninterpreted: tuple[str, ...]
    compared: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ASSUMED

    def __str__(self) -> str:
        verdict = "of a wrong verdict"
        if self.compared:
            verdict = "that a difference on the branches of the first draw was missed"
        functions = "no function is uninterpreted"
        if self.uninterpreted:
            functions = f"uninterpreted: {', '.join(self.uninterpreted)}"
        lines = [
            f"equal for all inputs: {self.what}",
            f"inputs: {', '.join(self.shapes)}",
            f"{self.points} points; the chance {verdict} is at most {self.chance:.1g}",
            functions,
            *self.compared,
        ]
        for assumption in self.assumed:
            lines.append(f"assumed: {assumption}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """The certificate as JSON, an object of the attributes."""
        return json.dumps(self._asdict())


def certify(what: str, shapes: Any, evidence: Evidence, assumed: Sequence[str] = ASSUMED) -> Equality:
    """The certificate of two programs that were found equal.

    Args:
        what: both sides and their mesh, in words.
        shapes: the inputs, a pytree of ShapeDtypeStructs.
        evidence: what all runs have shown.
        assumed: the assumptions of every proof of this kind; those of this one are added.
    """
    field = evidence.field
    inputs = []
    for x in jax.tree.leaves(shapes):
        inputs.append(f"{x.dtype}{list(x.shape)}")
    # What this proof assumes beyond the others: it is told only where it was used.
    assumptions = [*assumed, *describe_folded_constants(evidence)]
    if field.notes.logs:
        assumptions.append(POSITIVE)
    if evidence.decisions or evidence.sorted_lines:
        assumptions.append(SAMPLED)
    return Equality(
        what=what,
        shapes=tuple(inputs),
        points=field.settings.points,
        chance=field.chance(evidence.degree),
        uninterpreted=tuple(sorted(field.notes.uninterpreted)),
        compared=(*_describe_comparisons(evidence), *_describe_elements(evidence)),
        assumed=tuple(assumptions),
    )


def describe_folded_constants(evidence: Evidence) -> list[str]:
    """The constants that were taken for the numbers from which they were computed, a sentence each.

    Worked example: a compiler writes 0.80999994 for 0.9 * 0.9. The sides are equal if that constant stands for 0.81:
    "the constant 0.80999994 is 0.9 * 0.9, rounded".
    """
    sentences = []
    for (value, _dtype), folded in evidence.folded.items():
        sentences.append(f"the constant {value:.9g} is {folded.words}, rounded")
    return sentences


def make_note(assumed: Sequence[str]) -> str | None:
    """The note of a law that holds if something is assumed that no proof of its kind assumes; None if nothing is."""
    if not assumed:
        return None
    return f"equal; assumed: {'; '.join(assumed)}"


def _describe_comparisons(evidence: Evidence) -> list[str]:
    """Which comparisons went both ways, and which did not, as sentences."""
    sentences = []
    if evidence.decisions:
        lines = {decision.line for decision in evidence.decisions if not decision.is_open}
        noun = "line" if len(lines) == 1 else "lines"
        runs = f"{evidence.draws} draws of real inputs"
        if evidence.orders:
            runs += f" and {evidence.orders} random orders"
        sentences.append(f"comparisons: at {len(lines)} {noun}, both ways in {runs}")
    if evidence.sorted_lines:
        lines_of_places = ", ".join(evidence.sorted_lines)
        sentences.append(
            f"in order: the places of numbers among others, for the inputs that were drawn: {lines_of_places}"
        )
    # Both sides may run a line, or a loop may in each round: a sentence is told once, with the number of comparisons.
    counts: Counter[str] = Counter()
    for decision in evidence.decisions:
        if decision.is_open:
            counts[f"never else than {decision.outcome}: {decision.what} at {decision.line}"] += 1
    for sentence, count in counts.items():
        if count > 1:
            sentence += f" ({count} comparisons)"
        sentences.append(sentence)
    if evidence.lacks_floats:
        sentences.append("rare inputs were not looked for in floats: jax cannot run these programs for many at once")
    # Random orders take a comparison both ways. Without them nothing but the draws tells what it may change.
    if not evidence.orders:
        for decision in evidence.foreign:
            place = f"{decision.what} at {decision.line}"
            sentences.append(f"only one side compares, and only draws say that it may: {place}")
    return sentences


def _describe_elements(evidence: Evidence) -> list[str]:
    """Which elements of results were not compared, or are no number on both sides, as sentences."""
    sentences = []
    if evidence.outside:
        place = f"as first at {evidence.outside}"
        sentences.append(f"not compared where a number is outside of a function's domain, {place}")
    for name, (count, size) in evidence.alone.items():
        sentences.append(f"NaN on one side alone there: up to {count} of {size} elements of the {name}")
    for name, (count, size) in evidence.alone_at_zeros.items():
        sentences.append(
            f"NaN on one side alone where a divisor is zero, or a logarithm's argument: {count} of {size} elements of "
            f"the {name}"
        )
    for name, (count, size) in evidence.no_number.items():
        sentences.append(f"not a number on both sides: {count} of {size} elements of the {name}")
    return sentences
