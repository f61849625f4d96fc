"""Which steps another checkout lowers to another program: what a change of words must not change.

    python -m benchmarks.lowered --against ../before              # half an hour of CPU time for each checkout
    python -m benchmarks.lowered --against ../before --part 3/18  # every 18th, from the fourth on

The steps are those of the test suite: each plan with two models, each mesh of the transformer, each schedule in each of
its forms, and the covering list of options. Of each the StableHLO and the rows of the census are compared, by their
hashes. A step that raises in both checkouts alike is equal, too, and printed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax

import shardkit as sk

HERE = Path(__file__).parents[1]
DEVICES = 8
_MARK = "lowered: "  # before the line in which a child says what it lowered
_CLEARED = 50  # jax keeps what it traced: after so many steps it forgets

Lower = Callable[[], list[str]]


def list_steps() -> Iterator[tuple[str, Lower]]:
    """The steps by name. The checkout in which this runs has the tests that they come from."""
    from support import conformance, pipelines, rows

    for row in conformance.PLANS:
        for model in conformance.MODELS:
            yield f"plan {row.name}, {model.name}", partial(_lower_plan, row, model)
    for model in conformance.MESH_MODELS:
        for row in conformance.mesh_rows(model.name):
            yield f"mesh {row.name}, {model.name}", partial(_lower_plan, row, model, examples=8)
    for name in (*pipelines.BUILDERS, "from_csv"):
        for stages, microbatches in ((2, 3), (4, 3), (2, 4)):
            for mode in ("masked", "branch"):
                for recompute in (True, False):
                    form = {"mode": mode, "recompute": recompute}
                    text = f"schedule {name}, {stages} stages, {microbatches} microbatches, {form}"
                    yield text, partial(_lower_pipeline, name, stages, microbatches, form)
    for number in range(len(rows.cases())):
        yield f"covering row {number}", partial(_lower_row, number)


def _lower_plan(row: Any, model: Any, examples: int | None = None) -> list[str]:
    """The step of a plan, of all examples of a model's batch or of the first ones."""
    grad_fn = sk.value_and_grad(model.loss(row.model_axis))
    batch = model.batch(0)
    if examples is not None:
        batch = jax.tree.map(lambda x: x[:examples], batch)
    return _lower(row.sizes, grad_fn, optimizer=_make_adamw(), plan=row.plan(), params=model.params(), batch=batch)


def _lower_pipeline(name: str, stages: int, microbatches: int, form: dict[str, Any]) -> list[str]:
    from support import pipelines

    schedule = pipelines.make(name, stages, microbatches, 2)
    grad_fn = pipelines.pipelined_grad(*pipelines.PIECES, schedule, "stage", layer_numbers=True, **form)
    return _lower(
        {"stage": stages},
        grad_fn,
        optimizer=_make_adamw(),
        plan=sk.pp("stage"),
        params=pipelines.make_params(stages * schedule.chunks),
        batch=pipelines.make_batch(2 * microbatches),
    )


def _lower_row(number: int) -> list[str]:
    from support import conformance, rows

    case = rows.cases()[number]
    row = case.row
    return _lower(
        dict(row.mesh),
        row.grad_fn,
        optimizer=row.optimizer,
        plan=row.plan,
        params=conformance.weights(case.config),
        batch=rows.batch(0),
        accumulate=row.accumulate,
        precision=row.precision,
        nonfinite=row.nonfinite,
    )


def _make_adamw() -> Any:
    from support.training import lenient

    return lenient(optax.adamw(1e-2))


def _lower(
    sizes: dict[str, int], grad_fn: Any, *, optimizer: Any, plan: sk.Plan, params: Any, batch: Any, **options: Any
) -> list[str]:
    """The hashes of a step's StableHLO and of its census."""
    mesh = sk.make_mesh(jax.devices()[: math.prod(sizes.values())], **sizes)
    init, step = sk.make_train_step(grad_fn, optimizer, mesh=mesh, plan=plan, **options)
    state = init(params, jax.random.key(5))
    program = step.lower(state, batch).as_text()
    census = []
    for row in sk.census(step, state, batch).rows:
        census.append(f"{row.kind} {row.axes} {row.count} {row.bytes_in}")
    return [_hash(program), _hash("\n".join(sorted(census)))]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def print_lowered(part: int, parts: int) -> None:
    """Lowers a part of the steps in this checkout and prints their hashes."""
    sk.simulate_devices(DEVICES)
    hashes: dict[str, list[str]] = {}
    for number, (name, lower) in enumerate(list_steps()):
        if number % parts != part:
            continue
        try:
            hashes[name] = lower()
        except Exception as error:  # whatever a step raises is part of what it does
            hashes[name] = [f"{type(error).__name__}: {error}"]
        if len(hashes) % _CLEARED == 0:
            jax.clear_caches()
    print(_MARK + json.dumps(hashes))


def lower_in(checkout: Path, part: str) -> dict[str, list[str]]:
    """The hashes of a checkout's steps, by a child process that imports nothing of this one."""
    environment = os.environ | {"PYTHONPATH": f"{checkout}{os.pathsep}{checkout / 'tests'}"}
    # The list of steps is this checkout's, so that both lower the same ones; what they import is that of the folder.
    command = [sys.executable, "-P", str(Path(__file__)), "--print", "--part", part]
    child = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    for line in child.stdout.splitlines():
        if line.startswith(_MARK):
            hashes: dict[str, list[str]] = json.loads(line.removeprefix(_MARK))
            return hashes
    raise RuntimeError(f"{checkout} lowered nothing: {child.stderr[-2000:]}")


def main(argv: Sequence[str] | None = None) -> int:
    """Lowers the steps here and there; 1 if one differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", type=Path, default=HERE, help="the other checkout")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th step, from number i on")
    parser.add_argument("--print", action="store_true", help="lower in this folder alone, and print hashes")
    options = parser.parse_args(argv)
    if options.print:
        part, _, parts = options.part.partition("/")
        print_lowered(int(part), int(parts))
        return 0
    here = lower_in(HERE, options.part)
    there = lower_in(options.against.resolve(), options.part)
    differing = 0
    for name in sorted(here | there):
        if here.get(name) != there.get(name):
            differing += 1
            print(f"differs: {name}: {here.get(name)} here, {there.get(name)} there")
        elif len(here[name]) == 1:
            print(f"raises in both: {name}: {here[name][0]}")
    print(f"{len(here)} steps here, {len(there)} there, {differing} differ")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
