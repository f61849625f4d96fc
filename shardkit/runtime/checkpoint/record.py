"""The JSON record of a checkpoint: the run that wrote it, and the shape and dtype of each leaf.

Orbax writes it as its custom metadata, the last file of a step. Of a state with one leaf, in short:

    {"shardkit": {"format": 2, "step": 100, "position": 6400, "config": null, "metrics": {"loss": 0.5},
                  "versions": {"shardkit": "0.1.0", ...},
                  "leaves": {"params.w": {"shape": [8, 4], "dtype": "float32", "checksum": 2868304523}}},
     "crc32": 912310463}
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

from shardkit._arguments.checks import one_of, quote
from shardkit._arguments.files import read_file

FORMAT = 2  # increased whenever older readers would fail, including for other checksums
RECORD = "_CHECKPOINT_METADATA"  # orbax writes it last, before it renames the step
_LISTED = 3  # leaves in an error
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
    try:
        numbers = {}
        for name, value in (metrics or {}).items():
            numbers[str(name)] = float(value)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"save: metrics must be numbers by name; {error}. Pass for example {{'loss': 0.5}}."
        ) from error
    run = Run(
        step=step,
        position=_to_json_value("position", position),
        config=_to_json_value("config", config),
        metrics=numbers,
        versions={name: _find_version(name) for name in ("shardkit", "jax", "orbax-checkpoint")},
    )
    return {"shardkit": {"format": FORMAT, **run._asdict(), "leaves": dict(leaves)}}


def seal(record: dict[str, Any], sums: Mapping[str, int]) -> None:
    """Adds the checksums of leaves, and that of the record."""
    for path, checksum in sums.items():
        record["shardkit"]["leaves"][path]["checksum"] = checksum
    record["crc32"] = crc_of(record["shardkit"])


def crc_of(document: Any) -> int:
    """The checksum of a record, the same in whichever order its entries were read."""
    return zlib.crc32(json.dumps(document, sort_keys=True).encode())


def read_record(path: Path) -> tuple[Run, dict[str, Any]]:
    """The run and the records of the leaves of a finished step.

    Raises:
        ValueError: it is damaged, or not from shardkit.
        NewerError: it is of a newer format, with perhaps another checksum.
        OSError: it cannot be read.
    """
    is_newer = False
    is_intact = False
    try:
        record = json.loads(read_file(path / RECORD, _LARGEST, links=False))["custom_metadata"]
        document = record["shardkit"]
        version = document["format"]
        # Not isinstance: a bool is an int too, and True is no version.
        is_newer = type(version) is int and version > FORMAT
        if version in (1, FORMAT):  # 1 has the same fields
            is_intact = record["crc32"] == crc_of(document) and _is_complete(document)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # RecursionError: of nested brackets
        is_intact = False
    if is_newer:
        raise NewerError(f"its format is {version}; this version of shardkit reads up to {FORMAT}")
    if not is_intact:
        raise ValueError("its record is damaged, or not from shardkit")
    fields = {name: document[name] for name in Run._fields}
    return Run(**fields), document["leaves"]


def _is_complete(document: Mapping[str, Any]) -> bool:
    """Whether a record has all that is read of it later, of its type; where an entry is missing a KeyError.

    The checksum alone says that no byte has changed since a program wrote it, not which program that was.
    """
    document["position"], document["config"]  # any JSON values
    if type(document["step"]) is not int:
        return False
    for value in document["metrics"].values():
        if type(value) not in (int, float):
            return False
    for version in document["versions"].values():
        if type(version) is not str:
            return False
    return all(map(_is_leaf, document["leaves"].values()))


def _is_leaf(leaf: Mapping[str, Any]) -> bool:
    for size in leaf["shape"]:
        if type(size) is not int or size < 0:
            return False
    if type(leaf["dtype"]) is not str or type(leaf["checksum"]) is not int:
        return False
    return leaf["dtype"] != "key" or type(leaf["implementation"]) is str


def is_residual(path: str) -> bool:
    """Whether a leaf of a TrainState is a residual, by its path."""
    return path.partition(".")[0] == "residuals"


def _leave_out_residuals(records: Records) -> Records:
    return {path: record for path, record in records.items() if not is_residual(path)}


def select_records(where: str, stored: Records, wanted: Records, residuals: Residuals) -> Records:
    """The records of the leaves to read, after a check that they are the leaves of the target.

    Residuals are what error feedback of compressed sums holds, a row for each device. "keep" reads as many rows as were
    saved, which a target on another number of devices does not have; "reset" reads none.
    """
    one_of("restore", "residuals", residuals, ("keep", "reset"))
    if residuals == "reset":
        stored = _leave_out_residuals(stored)
        wanted = _leave_out_residuals(wanted)
    _check_residuals(where, stored, wanted)
    # Rows are not compared: residuals [4, 8] of four devices are read for a target with [2, 8], and spread there.
    with_saved_rows = {}
    for path, record in wanted.items():
        if is_residual(path) and path in stored and stored[path]["shape"]:
            rows = stored[path]["shape"][0]
            record = {**record, "shape": [rows, *record["shape"][1:]]}
        with_saved_rows[path] = record
    _check_paths(where, stored, wanted)
    _check_entry(where, stored, with_saved_rows, "shape", "Build the state with the saved configuration.")
    _check_entry(where, stored, with_saved_rows, "dtype", "Restore with the saved precision, and cast afterwards.")
    return stored


def _check_residuals(where: str, stored: Records, wanted: Records) -> None:
    """Refuses residuals that only the checkpoint has, or only the target."""
    stored_paths = [path for path in stored if is_residual(path)]
    wanted_paths = [path for path in wanted if is_residual(path)]
    if wanted_paths and not stored_paths:
        raise ValueError(
            f"{where} lacks the residuals of error feedback, which the plan of this state needs for "
            f"{list_some(wanted_paths)}. Pass residuals='reset' to begin with zeros, or restore into a state of a plan "
            "without feedback."
        )
    if stored_paths and not wanted_paths:
        raise ValueError(
            f"{where} has the residuals of error feedback, for {list_some(stored_paths)}, and the plan of this state "
            "has none. Pass residuals='reset' to drop them, or restore into a state of a plan with feedback."
        )


def _check_paths(where: str, stored: Records, wanted: Records) -> None:
    """Refuses leaves other than those of the checkpoint; nothing is cast, cropped or left out."""
    missing = [path for path in wanted if path not in stored]
    unexpected = [path for path in stored if path not in wanted]
    if not missing and not unexpected:
        return
    differences = []
    if missing:
        differences.append(f"lacks {list_some(missing)}")
    if unexpected:
        differences.append(f"has {list_some(unexpected)} that this state lacks")
    # If only optimizer leaves differ, another optimizer was chosen, and the parameters fit all the same.
    remedy = ""
    if all(path.startswith("opt_state.") for path in missing + unexpected):
        remedy = ", or load the parameters alone with load_params"
    raise ValueError(
        f"{where} {' and '.join(differences)}. Restore into a state of the same model, optimizer and precision{remedy}."
    )


def _check_entry(where: str, stored: Records, wanted: Records, name: str, remedy: str) -> None:
    """Refuses leaves that the checkpoint has in another shape or dtype, and names the first."""
    different = [path for path in wanted if stored[path][name] != wanted[path][name]]
    if not different:
        return
    path, *later_paths = different
    more = ""
    if later_paths:
        verb = "differs" if len(later_paths) == 1 else "differ"
        more = f", and {_count_leaves(later_paths)} more {verb}"
    raise ValueError(
        f"{where} has leaf {path!r} with {name} {stored[path][name]}; this state has {wanted[path][name]}{more}. "
        f"{remedy}"
    )


def list_some(paths: list[str]) -> str:
    """How many paths there are, and the first of them."""
    listed = quote(paths[:_LISTED])
    if len(paths) > _LISTED:
        listed += f" and {len(paths) - _LISTED} more"
    return f"{_count_leaves(paths)} ({listed})"


def _count_leaves(paths: list[str]) -> str:
    if len(paths) == 1:
        return "1 leaf"
    return f"{len(paths)} leaves"


def _to_json_value(name: str, value: Any) -> Any:
    """A value as JSON gives it back, such as a list for a tuple; refuses what JSON has not, or too much."""
    try:
        text = json.dumps(value)
        value = json.loads(text, object_pairs_hook=_make_dict)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"save: {name} must be a JSON value, of dicts, lists, strings, numbers, booleans and None; {error}. "
            "Convert it, an array for example with .tolist()."
        ) from error
    most = _LARGEST // 4
    if len(text) > most:
        raise ValueError(
            f"save: {name} must be at most {most:,} bytes of JSON; got {len(text):,}. Save an array in another file, "
            "and the name of that file here."
        )
    return value


def _make_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict; keys that differ in Python, such as 1 and '1', may be equal in JSON."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two keys of a dict become {name!r} in JSON")
    return dict(pairs)


def _find_version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"  # a source tree on the path, or a package with another name
