"""`shardkit bench strategies data=2 model=4`: one model under every plan that fits, beside jit and one device."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardkit.cli.bench.options import Output, check_output, choose_figures, describe_machine, write_records
from shardkit.cli.options import Optional, Sizes, Words

if TYPE_CHECKING:
    from shardkit.bench.workload import Workload

_QUICK = {"layers": 4, "dim": 16, "heads": 4, "examples": 16, "tokens": 4, "calls": 2, "rounds": 2}
_USUAL = {"layers": 4, "dim": 128, "heads": 4, "examples": 16, "tokens": 64, "calls": 1, "rounds": 100}
_OF_THE_TRANSFORMER = ("layers", "dim", "heads", "examples", "tokens")
_QUICK_CASES: tuple[str, ...] = (
    "jit: dp", "zero1", "fsdp", "fsdp, by layer", "dp x tp", "tp, sequence", "fsdp x tp, sequence", "1F1B",
)  # fmt: skip

EXAMPLES = {
    "shardkit bench strategies data=2 model=4": "the reference transformer",
    "shardkit bench strategies data=4 model=2 --model train.py:make": "your model",
    "shardkit bench strategies data=8 --optimizer muon": "Muon in place of AdamW",
    "shardkit bench strategies --quick": "the shortest run",
}


@dataclass(frozen=True)
class Options(Output):
    """Options of `shardkit bench strategies`."""

    mesh: Sizes = ("data=2", "model=4")
    """Axes and sizes: "data" splits examples, "model" splits layers; plans of data parallelism use both."""
    model: Optional[str] = None
    """MODULE:FUNCTION that returns (loss_fn, params, batch), and perhaps specs of the parameters over "model"; by
    default the reference transformer."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimizer of every case. Muon is sk.muon under a plan, and optax's on one device and under the partitioner."""
    only: Words = ()
    """Names of the cases to measure beside one device; by default all."""
    layers: Optional[int] = None
    """Layers of the reference transformer, 4 by default."""
    dim: Optional[int] = None
    """Width of the reference transformer, 128 by default."""
    heads: Optional[int] = None
    """Heads of the reference transformer, 4 by default."""
    examples: Optional[int] = None
    """Sequences in the reference transformer's global batch, 16 by default."""
    tokens: Optional[int] = None
    """Tokens of each of these sequences, 64 by default."""
    calls: Optional[int] = None
    """Steps of each case in each round, 1 by default."""
    rounds: Optional[int] = None
    """Rounds, 100 by default; every case has one turn in each."""


def strategies(options: Options) -> int:
    """Measure a model under every plan that fits a mesh, beside one device and jit's partitioner.

    The exit code is 1 if the results of a case differ from one device's by more than rounding.
    """
    from shardkit import bench
    from shardkit.bench.strategies import text
    from shardkit.bench.workload import cases_of, explain_left_out, reference
    from shardkit.cli.mesh import make_mesh, read_sizes
    from shardkit.models import transformer

    for axis in read_sizes("strategies", options.mesh):
        if axis not in ("data", "model"):
            raise ValueError(
                f"strategies: the axes must be 'data' and 'model'; got {axis!r}. Write for example data=4 model=2; "
                "pipelines run over 'model'."
            )
    _refuse_sizes_of_a_model(options)
    check_output("strategies", options)
    sizes = choose_figures(options, _USUAL, _QUICK)
    mesh = make_mesh("strategies", options.mesh, many=False)
    if options.model:
        work = _load_workload(options.model)
    else:
        config = transformer.Config(layers=sizes["layers"], dim=sizes["dim"], heads=sizes["heads"])
        work = reference(config, sizes["examples"], sizes["tokens"])
    print(describe_machine())
    for reason in explain_left_out(mesh.shape, work):
        print(f"left out: {reason}")
    only = options.only
    compiler_options = {}
    if options.quick:
        compiler_options = {"xla_backend_optimization_level": 0}  # compiles in a third of the time
        if not only:
            # Not all of the quick cases fit every mesh or model, and a name in `only` that does not fit is refused.
            fitting_cases = cases_of(work, mesh)
            only = tuple(name for name in _QUICK_CASES if name in fitting_cases)
    records = bench.strategies(
        work,
        mesh=mesh,
        optimizer=options.optimizer,
        only=only,
        calls=sizes["calls"],
        rounds=sizes["rounds"],
        compiler_options=compiler_options,
        progress=_print_progress,
    )
    print("\n" + text(records), flush=True)
    return write_records(records, options)


def _print_progress(name: str) -> None:
    print(f"compiling {name}", file=sys.stderr, flush=True)


def _refuse_sizes_of_a_model(options: Options) -> None:
    """Refuses sizes of the reference transformer beside a model of the user's."""
    if options.model is None:
        return
    for name in _OF_THE_TRANSFORMER:
        value = getattr(options, name)
        if value is not None:
            raise ValueError(
                f"strategies: --{name} is of the reference transformer; got {value} beside --model {options.model}. "
                "Leave it out: your function makes its parameters and its batch."
            )


def _load_workload(name: str) -> Workload:
    """The user's model, of MODULE:FUNCTION."""
    from shardkit.bench.workload import Workload
    from shardkit.cli.target import load

    loss_fn, arguments = load(name)
    if len(arguments) not in (2, 3):
        raise ValueError(
            "strategies: --model must name a function that returns (loss_fn, params, batch), or (loss_fn, params, "
            f"batch, rules); {name} returned a tuple of {1 + len(arguments)}. Return these."
        )
    return Workload(loss_fn, *arguments)
