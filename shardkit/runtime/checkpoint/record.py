"""The JSON document beside the arrays of a checkpoint: what the run was, and what each leaf must be."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from shardkit._check import quoted

FORMAT = 2  # another one wherever a reader of this one would go wrong: other checksums, too
RECORD = "_CHECKPOINT_METADATA"  # orbax writes it last, before a step gets its name
_NAMED = 3  # leaves that an error names


class Run(NamedTuple):
    """What a checkpoint says of the run that wrote it.

    Attributes:
        step: steps taken.
        position: the data position, as `save` was given it, after a round through JSON.
        config: the configuration, likewise.
        metrics: the metrics, by name.
        versions: of shardkit, jax and orbax-checkpoint.
    """

    step: int
    position: Any
    config: Any
    metrics: dict[str, float]
    versions: dict[str, str]


def make_record(step: int, position: Any, config: Any, metrics: Any, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a checkpoint, sealed with its own checksum.

    Raises:
        ValueError: what is no JSON, or metrics that are no numbers.
    """
    versions = {name: _version(name) for name in ("shardkit", "jax", "orbax-checkpoint")}
    try:
        numbers = {str(name): float(value) for name, value in (metrics or {}).items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"save: metrics must be numbers by name; {error}. Pass {{'loss': 0.5}}, say.") from error
    run = Run(step, _as_json("position", position), _as_json("config", config), numbers, versions)
    document = {"format": FORMAT, **run._asdict(), "leaves": dict(leaves)}
    return {"shardkit": document, "crc32": _seal(document)}


def read_record(path: Path) -> tuple[Run, dict[str, Any]]:
    """The run and the forms of the leaves of a finished step.

    Raises:
        ValueError: it is damaged, of something else, or of a format to come.
        OSError: it cannot be read.
    """
    try:
        record = json.loads((path / RECORD).read_text("utf-8"))["custom_metadata"]
        document, intact = record["shardkit"], record["crc32"] == _seal(record["shardkit"])
    except (ValueError, KeyError, TypeError):
        intact = False
    if not intact:
        raise ValueError("its record is damaged, or not of shardkit")
    if document["format"] not in (1, FORMAT):  # 1 is the same; its first checksums, before any release, were not
        raise ValueError(f"its format is {document['format']}, and this shardkit reads up to {FORMAT}")
    return Run(**{name: document[name] for name in Run._fields}), document["leaves"]


def compare(where: str, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuses leaves that are not those of the checkpoint; nothing is cast, cut or left out.

    Raises:
        ValueError: with the paths that are missing or not expected, or the two shapes or dtypes of a leaf.
    """
    missing, unexpected = [p for p in wanted if p not in stored], [p for p in stored if p not in wanted]
    if missing or unexpected:
        parts = [("lacks", missing), ("has, and this state has not,", unexpected)]
        raise ValueError(
            f"{where} {' and '.join(f'{verb} {_some(paths)}' for verb, paths in parts if paths)}. "
            "Restore into the state of the same model, optimizer and precision."
        )
    for name, remedy in (
        ("shape", "Build the state with the configuration that was saved."),
        ("dtype", "Nothing is cast: restore with the precision that was saved, and cast afterwards."),
    ):
        different = [path for path in wanted if stored[path][name] != wanted[path][name]]
        if different:
            path, *others = different
            more = f", and {_count(others)} more differ{'s' * (len(others) == 1)}" if others else ""
            was, now = (form[path][name] for form in (stored, wanted))
            raise ValueError(f"{where} has leaf {path!r} with {name} {was}; this state has {now}{more}. {remedy}")


def _some(paths: list[str]) -> str:
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return f"{_count(paths)} ({quoted(paths[:_NAMED])}{more})"


def _count(paths: list[str]) -> str:
    return f"{len(paths)} {'leaf' if len(paths) == 1 else 'leaves'}"


def _as_json(name: str, value: Any) -> Any:
    try:
        return json.loads(json.dumps(value), object_pairs_hook=_distinct)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"save: {name} must be JSON, of dicts, lists, strings, numbers, booleans and None; {error}. "
            "Convert it, an array for example with .tolist()."
        ) from error


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object as a dict; the keys of JSON are strings, and two keys that differ in Python may be one there."""
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two keys of a dict are {twice!r} there")
    return dict(pairs)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"  # a source tree on the path, or a package built under another name


def _seal(document: Any) -> int:
    return zlib.crc32(json.dumps(document, sort_keys=True).encode())
