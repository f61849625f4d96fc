"""The text loader: a fixed split, an order that depends on (seed, step) alone, and refusals."""

import os

import numpy as np
import pytest

from shardkit.cli import text as corpus
from support.refusals import value_error

PINNED = [132, 193, 161, 136]


def test_the_standard_library_is_split_by_file():
    text = corpus.standard_library()
    assert text.train.dtype == np.uint8 and text.train.size > 1_000_000
    assert 0.01 < text.validation.size / text.train.size < 0.2
    again = corpus.standard_library()
    np.testing.assert_array_equal(text.validation, again.validation)
    assert "standard library" in text.source


def test_the_split_goes_by_path_and_in_one_file_by_place(tmp_path):
    for index in range(60):
        (tmp_path / f"file{index}.txt").write_text(f"<{index}>")
    held = corpus.read_text([tmp_path]).validation.tobytes().split(b"\n")
    assert 0 < len(held) < 20
    (tmp_path / "another.txt").write_text("<another>")
    after = corpus.read_text([tmp_path]).validation.tobytes().split(b"\n")
    assert set(held) == set(after) - {b"<another>"}
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(200)))
    text = corpus.read_text([path])
    np.testing.assert_array_equal(text.train, np.arange(180))
    np.testing.assert_array_equal(text.validation, np.arange(180, 200))


# proves F66: the order is a function of (seed, step), pinned so that it never changes
def test_a_batch_is_a_function_of_seed_and_step():
    text = np.arange(200, dtype=np.uint8)
    batch = corpus.batch_at(text, seed=1, step=5, batch=4, length=6)
    again = corpus.batch_at(text, seed=1, step=5, batch=4, length=6)
    np.testing.assert_array_equal(batch["tokens"], again["tokens"])
    assert batch["tokens"].dtype == batch["targets"].dtype == np.int32
    assert batch["tokens"].shape == batch["targets"].shape == (4, 6)
    np.testing.assert_array_equal(batch["targets"], batch["tokens"] + 1)
    np.testing.assert_array_equal(batch["tokens"][:, 0], PINNED)
    for other in ({"seed": 2, "step": 5}, {"seed": 1, "step": 6}, {"seed": 5, "step": 1}):
        assert not np.array_equal(corpus.batch_at(text, batch=4, length=6, **other)["tokens"], batch["tokens"])


# proves F66: a larger batch begins with the smaller one, so the examples do not depend on how they are split
def test_examples_do_not_depend_on_the_batch_size_and_validation_covers_the_text_evenly():
    text = np.arange(250, dtype=np.uint8)
    few, many = (corpus.batch_at(text, seed=0, step=3, batch=b, length=5)["tokens"] for b in (4, 16))
    np.testing.assert_array_equal(few, many[:4])
    text = np.arange(201, dtype=np.uint8)
    batches = corpus.validation_batches(text, count=2, batch=5, length=20)
    starts = np.concatenate([b["tokens"][:, 0] for b in batches])
    assert starts[0] == 0 and starts[-1] == 180
    assert set(np.diff(starts)) == {20}


@pytest.mark.parametrize("call", ["train", "validation"])
def test_a_text_shorter_than_one_sequence(call):
    text = np.zeros(10, np.uint8)
    with value_error(
        "--data: the text must have at least one sequence of 11 bytes; it has 10. Pass more text (training and "
        "validation each need that much) or a shorter --length."
    ):
        if call == "train":
            corpus.batch_at(text, seed=0, step=0, batch=1, length=10)
        else:
            corpus.validation_batches(text, count=1, batch=1, length=10)
    assert corpus.batch_at(text, seed=0, step=0, batch=1, length=9)["tokens"].shape == (1, 9)


def test_a_path_that_is_not_there(tmp_path):
    with value_error(
        f"--data: the path must be a file or a directory; {tmp_path / 'nothing'} does not exist. Pass one that does."
    ):
        corpus.read_text([tmp_path / "nothing"])


@pytest.mark.parametrize("name", ["empty directory", "empty file"])
def test_no_text_at_all(name, tmp_path):
    path = tmp_path
    if name == "empty file":
        path = tmp_path / "empty.txt"
        path.touch()
    with value_error(f"--data: there must be text to train on; {path} has no bytes. Pass another path."):
        corpus.read_text([path])


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    path = tmp_path / "secret.txt"
    path.write_text("secret")
    path.chmod(0)
    if os.access(path, os.R_OK):  # root reads everything
        monkeypatch.setattr(type(path), "read_bytes", lambda self: (_ for _ in ()).throw(PermissionError(13, "denied")))
        reason = "denied"
    else:
        reason = "Permission denied"
    with value_error(
        f"--data: every file must be readable; {path} is not ({reason}). Change its permissions or remove it from "
        "--data."
    ):
        corpus.read_text([path])
