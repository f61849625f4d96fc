"""What the proof for all inputs says of many drawn pairs, as a table; no wrong pair may be proved.

    python tests/support/pairs/run.py --count 2000 --seed 0      # the table, and each false proof in its smallest form
    python tests/support/pairs/run.py --count 1 --seed 17        # one pair, as text, with the proof's message

Of 100,000 pairs each of n processes takes a part: --count 10000 --seed 0, --seed 10000 and so on. It ends with 1 if a
wrong pair was proved, or if a right one is none.
"""

import argparse
import collections
import dataclasses
import os
import sys
import time
from pathlib import Path

import jax

import shardkit as sk

sys.path.append(str(Path(__file__).parents[2]))
from support.compiling import QUICK
from support.pairs.shrinking import shrunk
from support.pairs.truth import KINDS
from support.pairs.verdicts import OUTCOMES, Pair, Verdict, cause_of_alarm, drawn, judged

# Where a divisor is zero, or a number is outside of a function's domain for some inputs, a certificate says nothing,
# and says that it does not: those are no false proofs. The sentence that says most is the first one.
EXCUSES = {
    "nan at ties": (
        "NaN on one side alone where a divisor is zero",
        "or inputs for which a divisor or the argument of a logarithm is zero",
    ),
    "domain": (
        "NaN on one side alone there: up to ",
        "not compared where a number is outside of a function's domain",
    ),
}
_CLEARED = 1000  # jax keeps what it traced: after so many pairs it forgets


@dataclasses.dataclass
class Tally:
    """What was said of pairs.

    Attributes:
        counts: by truth and outcome.
        mistakes: of wrong pairs, by mistake and outcome.
        false: the wrong pairs that were proved, with the kind of their difference.
        broken: right pairs that numpy says differ: faults of the generator.
        alarms: of right pairs that were refuted, the causes with the first seeds.
        excuses: of wrong pairs whose certificate says where it says nothing, the kind and the sentence.
        refusals: of pairs that were refused or crashed, the causes with the first seeds.
        seconds: CPU time to draw, to evaluate and to prove.
    """

    counts: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    mistakes: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    false: list[tuple[str, Pair]] = dataclasses.field(default_factory=list)
    broken: list[Pair] = dataclasses.field(default_factory=list)
    excuses: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)
    alarms: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    refusals: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    seconds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def take(self, seed: int, causes: bool = False) -> None:
        """Draws, evaluates and judges a pair; `causes` looks for the step behind which a right one is refuted."""
        begun = time.process_time()
        pair = drawn(seed)
        made = time.process_time()
        kind = pair.truth()
        known = time.process_time()
        verdict = judged(pair)
        self.seconds += collections.Counter(
            {"draw": made - begun, "evaluate": known - made, "prove": time.process_time() - known}
        )
        self._count(pair, kind, verdict)
        if causes and not pair.mistake and verdict.outcome == "refuted":
            self.alarms.setdefault(cause_of_alarm(pair), []).append(seed)

    def _count(self, pair: Pair, kind: str | None, verdict: Verdict) -> None:
        truth = f"wrong: {kind}" if kind else "unknown"
        if not pair.mistake:
            truth = "right"
        self.counts[truth, verdict.outcome] += 1
        if kind is not None and not pair.mistake:
            self.broken.append(pair)
        elif kind is not None:
            self.mistakes[pair.mistake, verdict.outcome] += 1
            if verdict.outcome == "proved":
                sentences = [sentence for sentence in EXCUSES.get(kind, ()) if sentence in verdict.message]
                if sentences:
                    self.excuses[kind, sentences[0]] += 1
                else:
                    self.false.append((kind, pair))
        if verdict.outcome in ("refused", "crashed"):
            self.refusals.setdefault(f"{verdict.outcome}: {verdict.cause}", []).append(pair.seed)

    def __str__(self) -> str:
        rows = ["right", *(f"wrong: {kind}" for kind in KINDS), "unknown"]
        total = sum(self.counts.values())
        lines = [_table("truth", rows, self.counts), ""]
        if self.mistakes:
            lines += [_table("mistake", sorted({name for name, _ in self.mistakes}), self.mistakes), ""]
        for title, causes in (("right, and refuted", self.alarms), ("refused or crashed", self.refusals)):
            for cause, seeds in sorted(causes.items(), key=lambda each: -len(each[1])):
                lines.append(f"{title}: {len(seeds):5} {cause}; seeds {', '.join(map(str, seeds[:3]))}")
        times = ", ".join(f"{name} {1e3 * seconds / total:.1f}" for name, seconds in self.seconds.items())
        for (kind, sentence), count in sorted(self.excuses.items()):
            lines.append(f"{kind}, and proved: {count} by certificates that say: {sentence}")
        lines.append(f"{total} pairs; CPU ms a pair: {times}")
        lines.append(f"false proofs: {len(self.false)}; right pairs that are none: {len(self.broken)}")
        return "\n".join(lines)


def _table(title: str, rows: list[str], counts: collections.Counter[tuple[str, str]]) -> str:
    width = max(map(len, [title, *rows])) + 2
    lines = [title.ljust(width) + "".join(outcome.rjust(9) for outcome in OUTCOMES)]
    for row in rows:
        lines.append(row.ljust(width) + "".join(f"{counts[row, outcome]:9}" for outcome in OUTCOMES))
    return "\n".join(lines)


def tallied(seeds: range, causes: bool = False, longest: float = float("inf")) -> Tally:
    """What is said of the pairs of some seeds, of which none begins after so many seconds."""
    tally, begun = Tally(), time.monotonic()
    for number, seed in enumerate(seeds):
        if time.monotonic() - begun > longest:
            break
        tally.take(seed, causes)
        if number % _CLEARED == _CLEARED - 1:
            jax.clear_caches()
    return tally


def _of_every_kind(false: list[tuple[str, Pair]]) -> list[tuple[str, Pair]]:
    """First one of each kind and mistake, then a second one of each, and so on."""
    met: collections.Counter[tuple[str, str]] = collections.Counter()
    turns = []
    for kind, pair in false:
        met[kind, pair.mistake] += 1
        turns.append((met[kind, pair.mistake], kind, pair))
    return [(kind, pair) for _, kind, pair in sorted(turns, key=lambda each: each[0])]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="how many pairs")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first; the others follow it")
    parser.add_argument("--shrink", type=int, default=20, help="print so many false proofs in their smallest form")
    options = parser.parse_args()
    os.environ["XLA_FLAGS"] = QUICK
    sk.simulate_devices(8)
    if options.count == 1:
        pair = drawn(options.seed)
        print(pair, f"\n  truth: {pair.truth()}\n  {judged(pair, line=True)}")
    tally = tallied(range(options.seed, options.seed + options.count), causes=True)
    print(tally)
    for pair in tally.broken[: options.shrink]:
        print("right by construction, and differs:", pair, sep="\n")
    for kind, pair in _of_every_kind(tally.false)[: options.shrink]:
        print(f"proved, and differs ({kind}):", shrunk(pair), sep="\n", flush=True)
    return 1 if tally.false or tally.broken else 0


if __name__ == "__main__":
    sys.exit(main())
