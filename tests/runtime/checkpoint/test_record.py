"""The record of a checkpoint: what is not one is found before anything is read of it."""

import json
import os

import hypothesis
import hypothesis.strategies as st
import pytest

import shardkit as sk
from shardkit.runtime.checkpoint import record
from shardkit.runtime.checkpoint.checkpoints import Checkpoints
from shardkit.runtime.checkpoint.reading import DamagedError
from support.refusals import raises, value_error

pytestmark = pytest.mark.check

LEAVES = {
    "params.w": {"shape": [2, 3], "dtype": "float32"},
    "key": {"shape": [], "dtype": "key", "implementation": "threefry2x32"},
}
PLACES = [(), ("custom_metadata",), ("custom_metadata", "crc32"), ("custom_metadata", "shardkit")]
PLACES += [PLACES[-1] + (name,) for name in ("format", *record.Run._fields, "leaves")]
PLACES += [PLACES[3] + (part, name) for part, name in (("metrics", "loss"), ("versions", "jax"))]
PLACES += [PLACES[3] + ("leaves", name) for name in LEAVES]
PLACES += [PLACES[3] + ("leaves", path, name) for path, leaf in LEAVES.items() for name in (*leaf, "checksum")]
PLAIN = st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=3)
VALUES = st.recursive(PLAIN, lambda each: st.lists(each, max_size=2) | st.dictionaries(st.text(max_size=3), each))


def metadata():
    """What a file holds that was saved."""
    found = record.make_record(5, 7, {"lr": 0.1}, {"loss": 0.5}, json.loads(json.dumps(LEAVES)))
    record.seal(found, dict.fromkeys(LEAVES, 2**31))
    return {"custom_metadata": found}


def stored(directory, text):
    (directory / "5").mkdir(exist_ok=True)
    (directory / "5" / record.RECORD).write_text(text)
    return Checkpoints(directory, read_only=True)


def test_what_was_saved_is_read(tmp_path):
    run = stored(tmp_path, json.dumps(metadata())).run()
    assert (run.step, run.position, run.config, run.metrics) == (5, 7, {"lr": 0.1}, {"loss": 0.5})
    assert run.versions["shardkit"] == sk.__version__


# A record without one of its entries was a KeyError, although the older step was there; so was one of another type.
@hypothesis.given(place=st.sampled_from(PLACES), gone=st.booleans(), value=VALUES, sealed=st.booleans())
@hypothesis.example(place=(*PLACES[3], "position"), gone=True, value=None, sealed=True)
@hypothesis.example(place=(*PLACES[3], "leaves"), gone=True, value=None, sealed=True)
@hypothesis.example(place=(*PLACES[3], "leaves", "key", "checksum"), gone=True, value=None, sealed=True)
@hypothesis.example(place=(*PLACES[3], "leaves", "key", "implementation"), gone=False, value="none", sealed=True)
@hypothesis.example(place=(*PLACES[3], "leaves", "params.w", "dtype"), gone=False, value="float33", sealed=True)
@hypothesis.example(place=(*PLACES[3], "leaves"), gone=False, value={"a": {}}, sealed=True)
def test_any_other_record_is_damaged_or_read(place, gone, value, sealed, tmp_path_factory):
    whole = {"": metadata()}
    *above, last = "", *place
    entries = whole
    for name in above:
        entries = entries[name]
    if gone:
        del entries[last]
    else:
        entries[last] = value
    try:
        inner = whole[""]["custom_metadata"]
        if sealed:
            inner["crc32"] = record.crc_of(inner["shardkit"])
    except (KeyError, TypeError):
        pass
    directory = tmp_path_factory.getbasetemp() / "records"
    directory.mkdir(exist_ok=True)
    try:
        run = stored(directory, json.dumps(whole.get("", ""))).run()
        assert type(run.step) is int and all(type(name) is str for name in run.metrics)
    except DamagedError as error:
        assert " cannot be restored: its record " in error.found and error.older is None
    except ValueError as error:
        assert f"; this version of shardkit reads up to {record.FORMAT}" in str(error)


# A pipe hung, and the brackets were a RecursionError.
def test_what_is_no_file_is_damaged(tmp_path):
    where = f"restore: step 5 of '{tmp_path}' cannot be restored: "
    last = ". No older step can be either."
    deep = stored(tmp_path, "[" * 100_000)
    with raises(DamagedError, f"{where}its record is damaged, or not from shardkit{last}"):
        deep.run()
    file = tmp_path / "5" / record.RECORD
    file.unlink()
    os.mkfifo(file)
    with raises(DamagedError, f"{where}'{file}' is no regular file{last}"):
        deep.run()
    file.unlink()
    with open(file, "wb") as large:
        large.truncate(record._LARGEST + 1)
    with raises(DamagedError, f"{where}'{file}' is larger than 268,435,456 bytes{last}"):
        deep.run()


def test_what_is_too_large_or_too_deep_for_a_record():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match=r"^save: position must be a JSON value, of dicts,"):
        record.make_record(5, deep, None, None, {})
    with value_error(
        "save: config must be at most 67,108,864 bytes of JSON; got 67,108,867. Save an array in another file, and "
        "the name of that file here."
    ):
        record.make_record(5, None, "a" * (2**26 + 1), None, {})
