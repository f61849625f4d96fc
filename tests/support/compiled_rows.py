"""The law `compiled` on the covering rows, one process a row: verdict and CPU seconds, on CPU or for chips not here.

    python tests/support/compiled_rows.py 1 5 12
    python tests/support/compiled_rows.py 0 5 --topology v5e:2x4
    python tests/support/compiled_rows.py 0 5 --topology h100:1x1x8 --missing

`--missing` only reads the modules, and prints the operations and calls of unknown names, with their counts and rows: so
a compiler's program is judged without the minutes of its proof. A call whose name is known may still be refused by its
settings, as the law says. The compiler of the topology must be installed (`shardkit[aot]`, `shardkit[aot-gpu]`). CPU
seconds are those of the law: trace, compile, read and prove.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS.parent), str(_TESTS)]

_LIMIT = 280  # seconds of one row


def prove_row(number, topology, only_missing):
    """Prints one row: a verdict, or the operations without a meaning."""
    import shardkit as sk

    sk.simulate_devices(8)
    from support import rows

    case = rows.shrink_case(pytest.MonkeyPatch(), number)  # of this process, which has one row: nothing is set back
    program = rows.program_of(case)
    start = time.process_time()
    verdict = judge(program, _choose_topology(topology, rows.sizes_of(case.choice)), only_missing)
    seconds = time.process_time() - start
    print(json.dumps({"name": case.name, "seconds": seconds, "verdict": verdict}), flush=True)


def _choose_topology(topology, sizes):
    """The topology, or of a GPU's that of as many devices as the row has."""
    from shardkit.analysis.hlo.topology import parse_topology

    if topology is None:
        return None
    parsed = parse_topology(topology)
    if parsed.platform == "tpu":
        return topology
    return f"{parsed.chip}:1x1x{math.prod(sizes.values())}"


def judge(program, topology, only_missing):
    """The verdict of the law on a step, for CPU or for a topology; or the step's operations of unknown names."""
    from shardkit.analysis.hlo import aot
    from shardkit.testing.exact.compiled_law import prove_step
    from shardkit.testing.exact.evidence import UnprovableError
    from shardkit.testing.exact.law import TracedRow

    if only_missing:
        return list_missing(aot.build(TracedRow.of(program).step, (), topology=topology).module)
    try:
        assumed = prove_step(program, topology)
    except UnprovableError as error:
        return f"undecided: {error}"
    except AssertionError as error:
        return f"REFUTED: {error}"
    return f"equal; assumed: {'; '.join(assumed)}" if assumed else "equal"


def list_missing(serialized):
    """The operations and calls of a module whose names are unknown, with their counts: {"tpu_custom_call": 12}."""
    from shardkit._jax import compat
    from shardkit.testing.exact.stablehlo.library_rules import LIBRARY
    from shardkit.testing.exact.stablehlo.module import rewrite
    from shardkit.testing.exact.stablehlo.operation_rules import OPERATION_RULES

    try:
        module = compat.parse_hlo(rewrite(serialized))
    except ValueError:
        return {"a part that jaxlib refuses": 1}
    missing = Counter()
    waiting = [module.operation]
    while waiting:
        operation = waiting.pop()
        name = operation.name
        if name == "stablehlo.custom_call":
            target = operation.attributes["call_target_name"].value
            if target not in LIBRARY:
                missing[target] += 1
        elif name not in (*OPERATION_RULES, "builtin.module", "func.func") and not name.endswith(".return"):
            missing[name] += 1
        for region in operation.regions:
            for block in region.blocks:
                waiting += [view.operation for view in block.operations]
    return dict(missing)


def print_missing(verdicts):
    """The table by operation: how often it occurs, and in which rows."""
    counts = Counter()
    numbers = defaultdict(list)
    for number, missing in verdicts.items():
        for name, count in missing.items():
            counts[name] += count
            numbers[name].append(number)
    for name, count in counts.most_common():
        print(f"{count:6}  {name}  in rows {', '.join(map(str, numbers[name]))}")
    readable = [number for number, missing in verdicts.items() if not missing]
    print(f"{len(readable)} of {len(verdicts)} rows without such an operation: {', '.join(map(str, readable))}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", type=int, help="numbers of rows; all by default")
    parser.add_argument("--topology", help='as "v5e:2x4" or "h100:1x1x8"; the CPU by default')
    parser.add_argument("--missing", action="store_true", help="only list operations of unknown names")
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
        row = json.loads(run.stdout.strip().splitlines()[-1])
        seconds.append(row["seconds"])
        verdicts[number] = row["verdict"]
        print(f"{number:3}  {row['seconds']:6.1f} CPU s  {row['name']}: {row['verdict']}", flush=True)
    print(f"{len(verdicts)} of {len(numbers)} rows were run to the end")
    if options.missing:
        print_missing(verdicts)
    elif seconds:
        print(f"median {statistics.median(seconds):.1f} CPU s, most {max(seconds):.1f}")


if __name__ == "__main__":
    main()
