"""Text to train on."""

import pytest


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp("corpus")
    for index in range(40):
        (root / f"{index}.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    return root
