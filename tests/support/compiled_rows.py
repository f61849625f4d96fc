"""The law `compiled` on the covering rows, one process a row: verdict and CPU seconds, on CPU or for chips not here.

    python tests/support/compiled_rows.py 1 5 12
    python tests/support/compiled_rows.py 0 5 --topology v5e:2x4
    python tests/support/compiled_rows.py 0 5 --topology h100:1x1x8 --missing

`--missing` only reads the modules, and prints which operations have no meaning, by their names, with their counts and
rows: so a compiler's program is judged without the minutes of its proof. The compiler of the topology must be installed
(`shardkit[aot]`, `shardkit[aot-gpu]`). CPU seconds are those of the law: trace, compile, read and prove.
"""

import argparse
import math
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS.parent), str(_TESTS)]

_LIMIT = 280  # seconds of one row


class _Patch:
    """What `rows.shrink` sets attributes with; a process has one row, so that nothing is set back."""

    def setattr(self, owner, name, value):
        setattr(owner, name, value)


def prove_row(number, topology, only_missing):
    """Prints one row: a verdict, or the operations without a meaning."""
    import shardkit as sk

    sk.simulate_devices(8)
    from support import rows

    choice = rows.cases()[number].choice
    in_four = choice["stage"] and rows.ways_of(choice) == 4  # of whose examples a device's must make microbatches
    rows.shrink(_Patch(), 48 if in_four else 24)
    case = rows.case_of(choice, number)
    program = rows.program_of(case)
    start = time.process_time()
    verdict = judge(program, _choose_topology(topology, rows.sizes_of(choice)), only_missing)
    print(f"{number}\t{time.process_time() - start:.1f}\t{case.name}\t{verdict}", flush=True)


def _choose_topology(topology, sizes):
    """The topology, or of a GPU's that of as many devices as the row has."""
    if topology and not topology.startswith("v"):
        return f"{topology.partition(':')[0]}:1x1x{math.prod(sizes.values())}"
    return topology


def judge(program, topology, only_missing):
    """The verdict of the law on the step of a program, for CPU or for a topology."""
    from shardkit.analysis.hlo import aot
    from shardkit.testing.exact import compiled_law
    from shardkit.testing.exact.compiled_pair import CompiledPair
    from shardkit.testing.exact.draws import STEP
    from shardkit.testing.exact.evidence import UnprovableError
    from shardkit.testing.exact.law import TracedRow

    try:
        if topology is None:
            return compiled_law.compiled(program, None) or "equal"
        traced = TracedRow.of(program)
        built = aot.build(traced.step, (), topology=topology)
        if only_missing:
            return list_missing(built.module)
        pair = CompiledPair.of_absent("law", built, topology, traced.step.jaxpr)

        def make_arguments(field):
            return compiled_law._make_arguments(program, traced, field)

        pair.prove("law", "", "output", make_arguments, 2, STEP)
        return "equal"
    except UnprovableError as error:
        return f"undecided: {error}"
    except AssertionError as error:
        return f"REFUTED: {error}"


def list_missing(serialized):
    """The operations of a module that have no meaning, with their counts: "tpu_custom_call 12, ...", "none"."""
    from shardkit._jax import compat
    from shardkit.testing.exact.stablehlo.library_rules import LIBRARY
    from shardkit.testing.exact.stablehlo.module import rewrite
    from shardkit.testing.exact.stablehlo.operation_rules import OPERATION_RULES

    try:
        module = compat.parse_hlo(rewrite(serialized))
    except ValueError:
        return "a type that jaxlib refuses 1"
    missing = Counter()
    waiting = [module.operation]
    while waiting:
        operation = waiting.pop()
        name = operation.name
        if name == "stablehlo.custom_call":
            target = operation.attributes["call_target_name"].value
            if target not in LIBRARY:
                missing[target.replace(",", "")] += 1
        elif name not in (*OPERATION_RULES, "builtin.module", "func.func") and not name.endswith(".return"):
            missing[name] += 1
        for region in operation.regions:
            for block in region.blocks:
                waiting += [view.operation for view in block.operations]
    return ", ".join(f"{name} {count}" for name, count in missing.most_common()) or "none"


def print_missing(verdicts):
    """The table by operation: how often it occurs, and in which rows."""
    counts = Counter()
    numbers = defaultdict(list)
    for number, verdict in verdicts.items():
        if verdict == "none":
            continue
        for part in verdict.split(", "):
            name, _, count = part.rpartition(" ")
            counts[name] += int(count)
            numbers[name].append(number)
    for name, count in counts.most_common():
        print(f"{count:6}  {name}  in rows {', '.join(map(str, numbers[name]))}")
    readable = [number for number, verdict in verdicts.items() if verdict == "none"]
    print(f"{len(readable)} of {len(verdicts)} rows without such an operation: {', '.join(map(str, readable))}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", type=int, help="numbers of rows; all by default")
    parser.add_argument("--topology", help='as "v5e:2x4" or "h100:1x1x8"; the CPU by default')
    parser.add_argument("--missing", action="store_true", help="only list operations without a meaning")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        prove_row(options.rows[0], options.topology, options.missing)
        return
    numbers = options.rows
    if not numbers:
        from support import rows

        numbers = range(len(rows.cases()))
    further = [f"--topology={options.topology}"] if options.topology else []
    further += ["--missing"] if options.missing else []
    seconds, verdicts = [], {}
    for number in numbers:
        command = [sys.executable, __file__, str(number), "--one", *further]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, check=False)
        except subprocess.TimeoutExpired:
            print(f"{number:3}  not in {_LIMIT} s", flush=True)
            continue
        if run.returncode:
            print(f"{number:3}  failed: {run.stderr.strip().splitlines()[-1]}", flush=True)
            continue
        _, cpu_seconds, name, verdict = run.stdout.strip().splitlines()[-1].split("\t")
        seconds.append(float(cpu_seconds))
        verdicts[number] = verdict
        print(f"{number:3}  {float(cpu_seconds):6.1f} CPU s  {name}: {verdict}", flush=True)
    if options.missing:
        print_missing(verdicts)
    elif seconds:
        print(f"median {statistics.median(seconds):.1f} CPU s, most {max(seconds):.1f}")


if __name__ == "__main__":
    main()
