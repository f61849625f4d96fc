"""The JSON record of a checkpoint: the run that wrote it, and the shape and dtype of each leaf."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

from shardkit._arguments.checks import one_of, quoted
from shardkit._arguments.files import read_file

FORMAT = 2  # increased whenever older readers would fail, including for other checksums
RECORD = "_CHECKPOINT_METADATA"  # orbax writes it last, before it renames the step
_NAMED = 3  # leaves in an error
_LARGEST = 2**28  # bytes of a record, of which the position and the configuration may be a quarter each


Residuals = Literal["keep", "reset"]
Records = Mapping[str, Any]


class Run(NamedTuple):
    """The run that wrote a checkpoint.

    Attributes:
        step: steps taken.
        position: the data position passed to `save`, after a round trip through JSON.
        config: the configuration, likewise.
        metrics: the metrics, by name.
        versions: of shardkit, jax and orbax-checkpoint.
    """

    step: int
    position: Any
    config: Any
    metrics: dict[str, float]
    versions: dict[str, str]


class NewerError(ValueError):
    """A record in a format that only newer versions of shardkit read."""


def make_record(step: int, position: Any, config: Any, metrics: Any, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a checkpoint, which `seal` completes; refuses what is not JSON, and metrics without numbers."""
    versions = {name: _version(name) for name in ("shardkit", "jax", "orbax-checkpoint")}
    try:
        numbers = {str(name): float(value) for name, value in (metrics or {}).items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"save: metrics must be numbers by name; {error}. Pass for example {{'loss': 0.5}}."
        ) from error
    run = Run(step, _as_json("position", position), _as_json("config", config), numbers, versions)
    return {"shardkit": {"format": FORMAT, **run._asdict(), "leaves": dict(leaves)}}


def seal(record: dict[str, Any], sums: Mapping[str, int]) -> None:
    """Adds the checksums of leaves, and that of the record."""
    for path, total in sums.items():
        record["shardkit"]["leaves"][path]["checksum"] = total
    record["crc32"] = _seal(record["shardkit"])


def read_record(path: Path) -> tuple[Run, dict[str, Any]]:
    """The run and the records of the leaves of a finished step.

    Raises:
        ValueError: it is damaged, or not from shardkit.
        NewerError: it is of a newer format, whose checksum may be another.
        OSError: it cannot be read.
    """
    try:
        record = json.loads(read_file(path / RECORD, _LARGEST, links=False))["custom_metadata"]
        document, found = record["shardkit"], record["shardkit"]["format"]
        newer = type(found) is int and found > FORMAT
        sealed = found in (1, FORMAT) and record["crc32"] == _seal(document)  # 1 has the same fields
        intact = newer or (sealed and _is_complete(document))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # RecursionError: of nested brackets
        newer = intact = False
    if newer:
        raise NewerError(f"its format is {found}; this version of shardkit reads up to {FORMAT}")
    if not intact:
        raise ValueError("its record is damaged, or not from shardkit")
    return Run(**{name: document[name] for name in Run._fields}), document["leaves"]


def _is_complete(document: Mapping[str, Any]) -> bool:
    """Whether a record has all that is read of it later, of its type; where an entry is missing a KeyError."""
    document["position"], document["config"]
    return (
        type(document["step"]) is int
        and all(type(value) in (int, float) for value in document["metrics"].values())
        and all(type(value) is str for value in document["versions"].values())
        and all(_is_leaf(leaf) for leaf in document["leaves"].values())
    )


def _is_leaf(leaf: Mapping[str, Any]) -> bool:
    return (
        all(type(size) is int and size >= 0 for size in leaf["shape"])
        and type(leaf["dtype"]) is str
        and type(leaf["checksum"]) is int
        and (leaf["dtype"] != "key" or type(leaf["implementation"]) is str)
    )


def _compare(where: str, stored: Records, wanted: Records) -> None:
    """Refuses leaves other than those of the checkpoint; nothing is cast, cropped or left out."""
    missing, unexpected = [p for p in wanted if p not in stored], [p for p in stored if p not in wanted]
    if missing or unexpected:
        lacks = [f"lacks {some(missing)}"] if missing else []
        extra = [f"has {some(unexpected)} that this state lacks"] if unexpected else []
        alone = all(path.startswith("opt_state.") for path in missing + unexpected)
        or_else = ", or load the parameters alone with load_params" if alone else ""
        raise ValueError(
            f"{where} {' and '.join(lacks + extra)}. Restore into a state of the same model, optimizer and precision"
            f"{or_else}."
        )
    for name, remedy in (
        ("shape", "Build the state with the saved configuration."),
        ("dtype", "Restore with the saved precision, and cast afterwards."),
    ):
        different = [path for path in wanted if stored[path][name] != wanted[path][name]]
        if different:
            path, *others = different
            more = f", and {_count(others)} more differ{'s' * (len(others) == 1)}" if others else ""
            was, now = (leaf[path][name] for leaf in (stored, wanted))
            raise ValueError(f"{where} has leaf {path!r} with {name} {was}; this state has {now}{more}. {remedy}")


def is_residual(path: str) -> bool:
    """Whether a leaf of a TrainState is a residual, by its path."""
    return path.partition(".")[0] == "residuals"


def compared(where: str, stored: Records, wanted: Records, residuals: Residuals) -> Records:
    """The records of the leaves to read, after a check that they are those that a target wants.

    "keep" reads residuals with as many rows as were saved, "reset" reads none.
    """
    one_of("restore", "residuals", residuals, ("keep", "reset"))
    if residuals == "reset":
        stored, wanted = ({p: record for p, record in each.items() if not is_residual(p)} for each in (stored, wanted))
    theirs, ours = ([path for path in records if is_residual(path)] for records in (stored, wanted))
    if ours and not theirs:
        raise ValueError(
            f"{where} lacks the residuals of error feedback, which the plan of this state needs for {some(ours)}. Pass "
            "residuals='reset' to begin with zeros, or restore into a state of a plan without feedback."
        )
    if theirs and not ours:
        raise ValueError(
            f"{where} has the residuals of error feedback, for {some(theirs)}, and the plan of this state has none. "
            "Pass residuals='reset' to leave out what they hold, or restore into a state of a plan with feedback."
        )
    rows = {path: stored[path]["shape"][0] for path in ours if path in stored and stored[path]["shape"]}
    shapes = {path: {**wanted[path], "shape": [saved, *wanted[path]["shape"][1:]]} for path, saved in rows.items()}
    _compare(where, stored, {path: shapes.get(path, record) for path, record in wanted.items()})
    return stored


def some(paths: list[str]) -> str:
    """The first of some paths, and how many there are."""
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return f"{_count(paths)} ({quoted(paths[:_NAMED])}{more})"


def _count(paths: list[str]) -> str:
    return f"{len(paths)} {'leaf' if len(paths) == 1 else 'leaves'}"


def _as_json(name: str, value: Any) -> Any:
    try:
        text = json.dumps(value)
        found = json.loads(text, object_pairs_hook=_distinct)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"save: {name} must be a JSON value, of dicts, lists, strings, numbers, booleans and None; {error}. "
            "Convert it, an array for example with .tolist()."
        ) from error
    if len(text) > _LARGEST // 4:
        raise ValueError(
            f"save: {name} must be at most {_LARGEST // 4:,} bytes of JSON; got {len(text):,}. Save an array in a file "
            "of its own, and its name here."
        )
    return found


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict; keys that differ in Python, such as 1 and '1', may be equal in JSON."""
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two keys of a dict become {twice!r} in JSON")
    return dict(pairs)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"  # a source tree on the path, or a package with another name


def _seal(document: Any) -> int:
    return zlib.crc32(json.dumps(document, sort_keys=True).encode())
