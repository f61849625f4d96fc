"""What the proof says of optimized modules with one edit, as a table; no edit that changes a result may be proved.

    python tests/support/edits/run.py --count 100 --seed 0       # so many that change something
    python tests/support/edits/run.py --program tp --kind "a sum dropped" --site 0

It ends with 1 if an edit that changes a result was not refuted.
"""

import argparse
import collections
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
from support.compiling import QUICK

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK}"

import shardkit as sk

sk.simulate_devices(8)

from support.edits.kinds import KINDS  # noqa: E402
from support.edits.programs import PROGRAMS  # noqa: E402
from support.edits.verdicts import OUTCOMES, Edit, Verdict, count_sites, draw_edits, judge  # noqa: E402


def format_table(verdicts: list[Verdict]) -> str:
    """The verdicts by kind of edit."""
    width = max(map(len, KINDS)) + 2
    lines = ["kind".ljust(width) + "".join(name.rjust(13) for name in (*OUTCOMES, "named", "no change"))]
    for kind in (*KINDS, "all"):
        rows = [verdict for verdict in verdicts if kind in ("all", verdict.edit.kind)]
        changed = [verdict for verdict in rows if verdict.changes]
        counts = collections.Counter(verdict.outcome for verdict in changed)
        cells = [counts[outcome] for outcome in OUTCOMES]
        cells += [sum(verdict.is_named for verdict in changed), len(rows) - len(changed)]
        lines.append(kind.ljust(width) + "".join(f"{cell:13}" for cell in cells))
    return "\n".join(lines)


def describe(verdict: Verdict) -> str:
    """One verdict, with the message."""
    edit = verdict.edit
    lines = ", ".join(verdict.lines[:1]) or "no line"
    change = "changes results" if verdict.changes else "changes no result"
    named = " with its line" if verdict.is_named else ""
    return (
        f"{edit.program}, {edit.kind}, site {edit.site}: {verdict.operation} of {lines}, which {change}: "
        f"{verdict.outcome} in {verdict.seconds:.1f} s{named}\n    {verdict.message}"
    )


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--program", choices=PROGRAMS)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--site", type=int)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    verdicts = []
    if options.site is not None:
        print(describe(judge(Edit(options.program, options.kind, options.site))))
        return 0
    programs = [options.program] if options.program else list(PROGRAMS)
    most = sum(count_sites(program, kind) for program in programs for kind in KINDS)
    for edit in draw_edits(options.seed, most, programs):
        if options.kind not in (None, edit.kind):
            continue
        verdict = judge(edit)
        verdicts.append(verdict)
        wrong = verdict.changes and not (verdict.outcome == "refuted" and verdict.is_named)
        if options.verbose or wrong:
            print(describe(verdict), flush=True)
        if sum(verdict.changes for verdict in verdicts) == options.count:
            break
    print(format_table(verdicts))
    changed = [verdict for verdict in verdicts if verdict.changes]
    seconds = sum(verdict.seconds for verdict in verdicts)
    print(f"{most} edits in all; {len(changed)} drawn that change results; {seconds / len(verdicts):.2f} CPU s a proof")
    return int(any(verdict.outcome != "refuted" for verdict in changed))


if __name__ == "__main__":
    sys.exit(main())
