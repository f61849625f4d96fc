"""Memory of a device by what it holds, and the memory of ZeRO's stages against the number of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

from shardkit import _check, cost
from shardkit._kinds import short
from shardkit._typed import typed
from shardkit.analysis.hlo.differences import Compiled
from shardkit.analysis.hlo.memory import Memory
from shardkit.analysis.hlo.report import Report
from shardkit.cost import ZeroMemory
from shardkit.layout import bytes_per_device
from shardkit.viz.bars import Bar, Line, size, stacked
from shardkit.viz.style import INK, SMALL, file_of, look, page, saved, stroked

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
            across="bytes per device",
            nothing="nothing",
            limit=(mark, f"{size(mark)} on a device") if mark is not None and drawn else None,
        )
        return saved(picture, path)


@partial(typed, where="viz.zero_memory")
def zero_memory(
    parameters: float,
    ways: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    *,
    stages: Sequence[int] = (0, 1, 2, 3),
    limit: float | None = None,
    output: str | Path | None = None,
    **bytes: float,
) -> Any:
    """The picture of `cost.zero_memory` against the number of devices: a line per stage of ZeRO.

    Args:
        parameters: number of parameters.
        ways: numbers of devices that the state is sharded over.
        stages: of 0 (data parallelism), 1, 2 and 3 (fsdp).
        limit: bytes of a device, which a line marks.
        output: a .png or .svg to write; missing directories are created. The same numbers give the same bytes.
        **bytes: parameter_bytes, gradient_bytes and optimizer_bytes, as for `cost.zero_memory`.

    Returns:
        A matplotlib figure, which notebooks show. The gid of a line is its name, as in "stage 1".

    Raises:
        ValueError: no ways or stages; what `cost.zero_memory` refuses; another kind of file.
        RuntimeError: matplotlib is not installed.

    Example:
        >>> picture = sk.viz.zero_memory(7e9, ways=(1, 8, 64), limit=16 * 2**30)
    """
    path = file_of("viz.zero_memory", output)
    _check.positive("viz.zero_memory", parameters=parameters, limit=1 if limit is None else limit)
    if not len(ways) or not len(stages):
        raise ValueError(
            f"viz.zero_memory: ways and stages must name at least one each; got {ways=} and {stages=}. Pass for "
            "example ways=(1, 8, 64)."
        )
    lines = zero_lines(parameters, ways, stages, **bytes)
    with look():
        note = f"{parameters:,.0f} parameters: model state per device at each stage"
        picture, axes = page("memory of ZeRO", note, width=4.6, height=2.8, left=0.85, right=1.5)
        for number, line in enumerate(lines):
            xs, ys = zip(*line.points, strict=True)
            axes.plot(xs, ys, label=line.name, gid=line.name, **stroked(number))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(list(ways), [str(n) for n in ways])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda y, _: size(y))
        axes.set_xlabel("devices that share the state")
        axes.set_ylabel("bytes per device")
        axes.grid()
        if limit is not None:
            axes.axhline(limit, color=INK, linewidth=1.2, linestyle=(0, (6, 2)), gid="limit")
            axes.annotate(
                f"{size(limit)} on a device", (1, limit), (-2, 2), ("axes fraction", "data"), ha="right",
                textcoords="offset points", size=SMALL,
            )  # fmt: skip
        axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1), borderaxespad=0)
        return saved(picture, path)


def zero_lines(parameters: float, ways: Sequence[int], stages: Sequence[int], **bytes: float) -> list[Line]:
    """Bytes per device against ways, a line per stage."""
    names = {0: "stage 0: dp", 1: "stage 1: zero1", 2: "stage 2: zero2", 3: "stage 3: fsdp"}
    return [
        Line(names.get(s, str(s)), tuple((float(n), cost.zero_memory(parameters, n, s, **bytes)) for n in ways))
        for s in stages
    ]


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
