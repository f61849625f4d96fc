"""Memory of a device by what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

from shardkit._arguments.typed import short, typed
from shardkit.analysis.hlo.differences import Compiled
from shardkit.analysis.hlo.memory import Memory
from shardkit.analysis.hlo.report import Report
from shardkit.cost import ZeroMemory
from shardkit.meshes.layout import bytes_per_device
from shardkit.viz.bars import Bar, Scale, size, stacked
from shardkit.viz.style import file_of, look, saved

_FAR = 4.0  # times the longest bar, up to which a limit is drawn
# Each has one look in all pictures.
KINDS = ("parameters", "optimizer", "gradients", "activations", "temporaries", "arguments", "results", "program")


@partial(typed, where="viz.memory")
def memory(memory: Any, *, state: Any = None, limit: float | None = None, output: str | Path | None = None) -> Any:
    """The picture of a device's memory by what it holds: a bar of parts that add up.

    A compiled program has arguments, results that are in no argument's buffer, temporaries (gradients and activations
    among them, which the compiler does not tell apart) and its code. With the train state, the parameters and the
    optimizer's state are told apart from the other arguments.

    Args:
        memory: a report of `aot.compile`, what `analysis.compiled` returned, a ZeroMemory of `cost.zero_breakdown`, or
            a mapping of "parameters", "optimizer", "gradients", "activations", "temporaries" or other words to bytes;
            several of them by name are drawn one below the other.
        state: the TrainState that is an argument of the compiled step; `init.abstract(params)` is enough.
        limit: bytes of a device, which a line marks where the bars are not short beside it; None: that of the reports.
        output: a .png or .svg to write; missing directories are created. The same memory gives the same bytes.

    Returns:
        A matplotlib figure, which notebooks show. The gid of a bar is its name and its part, as in "fsdp, parameters".

    Raises:
        TypeError: something else than memory, or a state that is none.
        ValueError: a program that the compiler refused, of which there are no parts; another kind of file.
        RuntimeError: matplotlib is not installed.

    Example:
        >>> parts = {f"ZeRO-{stage}": sk.cost.zero_breakdown(1e9, 8, stage) for stage in range(4)}
        >>> picture = sk.viz.memory(parts, limit=16 * 2**30)
    """
    path = file_of("viz.memory", output)
    several = parts(memory, state)
    bars = [Bar(name, kind, value) for name, own in several.items() for kind, value in own.items() if value > 0]
    reports = [each for each in _several(memory).values() if isinstance(each, Report)]
    mark = limit if limit is not None else max((each.available for each in reports), default=None)
    sizes = {name: sum(own.values()) for name, own in several.items()}
    note = "; ".join(f"{name} {size(held)}".strip() for name, held in sizes.items())
    note += "" if mark is None else f" of {size(mark)}"
    drawn = mark is not None and mark <= _FAR * max(sizes.values(), default=0.0)
    with look():
        picture = stacked(
            "memory of a device",
            note,
            bars,
            [*KINDS, *dict.fromkeys(bar.kind for bar in bars if bar.kind not in KINDS)],
            Scale("bytes per device"),
            nothing="nothing",
            limit=(mark, f"{size(mark)} on a device") if mark is not None and drawn else None,
        )
        return saved(picture, path)


def parts(given: Any, state: Any = None) -> dict[str, dict[str, float]]:
    """Bytes by kind of one memory, or of several by name; refuses anything else."""
    return {name: _parts(each, state) for name, each in _several(given).items()}


def _several(given: Any) -> Mapping[str, Any]:
    if isinstance(given, Mapping) and not all(isinstance(value, Real) for value in given.values()):
        return given
    return {"": given}


def _parts(given: Any, state: Any) -> dict[str, float]:
    if isinstance(given, ZeroMemory):
        return {"parameters": given.parameters, "optimizer": given.optimizer, "gradients": given.gradients}
    if isinstance(given, Mapping) and all(isinstance(value, Real) for value in given.values()):
        return {str(name): float(value) for name, value in given.items()}
    if isinstance(given, Report) and given.memory is None:
        raise ValueError(
            f"viz.memory: the program must be compiled; got a report of one that does not fit {given.topology}, of "
            "which the compiler gives no parts. Pass a report with fits=True."
        )
    held = given.memory if isinstance(given, Report | Compiled) else given
    if not isinstance(held, Memory):
        raise TypeError(
            f"viz.memory: memory must be a report, a ZeroMemory, bytes by name, or a mapping of names to these; got "
            f"{short(given)}. Pass for example sk.cost.zero_breakdown(1e9, 8, stage=1)."
        )
    known: dict[str, float] = {}
    if state is not None:
        if not (hasattr(state, "params") and hasattr(state, "opt_state")):
            raise TypeError(
                f"viz.memory: state must be a TrainState; got {short(state)}. Pass init.abstract(params), or leave it "
                "out."
            )
        known = {"parameters": bytes_per_device(state.params), "optimizer": bytes_per_device(state.opt_state)}
    rest = {
        "temporaries": held.temp,
        "arguments": max(0, held.argument - sum(known.values())),
        "results": held.output - held.alias,
        "program": held.generated_code,
    }
    return known | rest
