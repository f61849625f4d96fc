"""The comments `proves`: what the script counts, what it does not, and what it refuses."""

import subprocess
import sys

import pytest

from support import proved

pytestmark = pytest.mark.check

TEST = "def test_a(a):\n    pass\n"
MISPLACED = "test_planted.py:1: a comment `proves` must stand at a test: on its def, directly above, or inside it."
FEATURES = "S1 the first\nS2 the second\nS3 the third\nF1 another\n"


def say(tmp_path, capsys, text, *words, name="test_planted.py"):
    """The exit code and what was printed for one planted file of tests."""
    (tmp_path / "features.txt").write_text(FEATURES)
    (tmp_path / "tests" / "deeper").mkdir(parents=True, exist_ok=True)
    (tmp_path / "tests" / "deeper" / name).write_text(text)
    code = proved.main(["--tests", str(tmp_path / "tests"), "--features", str(tmp_path / "features.txt"), *words])
    out = capsys.readouterr()
    return code, out.out.splitlines(), out.err.replace(str(tmp_path / "tests" / "deeper") + "/", "").splitlines()


@pytest.mark.parametrize(
    "text",
    [
        "def test_a():  # proves S1, F1\n    pass\n",
        "# proves S1, F1\ndef test_a():\n    pass\n",
        "# proves S1, F1: because\n# it goes on\n@mark\n@pytest.mark.parametrize('a', [\n    1,\n])\n" + TEST,
        "# proves S1,\n# F1: in two lines\ndef test_a():\n    pass\n",
        "def test_a():\n    def inside():\n        pass  # proves S1, F1 as a remark\n    inside()\n",
        "def test_a(a=[\n    1,  # proves S1, F1\n]):\n    pass\n",
        "class TestAll:\n    # proves S1, F1\n    def test_a(self):\n        pass\n",
        "# proves S1, F1\n@pytest.mark.parametrize('a', [pytest.param(1, marks=pytest.mark.deep), 2])\n" + TEST,
        "# proves S1\n@pytest.mark.deep\ndef test_a(): pass\ndef test_b(): pass  # proves S1, F1\n",
    ],
)
def test_what_counts(tmp_path, capsys, text):
    code, lines, errors = say(tmp_path, capsys, text)
    assert (code, errors) == (0, [])
    assert lines == ["S: 1 of 3 proved; not proved: S2, S3", "F: 1 of 1 proved"]


@pytest.mark.parametrize(
    "text",
    [
        "@pytest.mark.deep\ndef test_a():  # proves S1, F1\n    pass\n",
        "@pytest.mark.skip(reason='one day')\ndef test_a():  # proves S1, F1\n    pass\n",
        "pytestmark = pytest.mark.deep\ndef test_a():  # proves S1, F1\n    pass\n",
        "pytestmark = [pytest.mark.check, pytest.mark.deep]\ndef test_a():  # proves S1, F1\n    pass\n",
        "@pytest.mark.deep\nclass TestAll:\n    def test_a(self):  # proves S1, F1\n        pass\n",
        "def test_a():  # proves S1, F1 in part: the rest is missing\n    pass\n",
    ],
)
def test_what_does_not_count(tmp_path, capsys, text):
    code, lines, errors = say(tmp_path, capsys, text)
    assert (code, errors) == (0, [])
    assert lines == [
        "S: 0 of 3 proved; in part, or outside the default suite: S1; not proved: S2, S3",
        "F: 0 of 1 proved; in part, or outside the default suite: F1",
    ]


def test_ranges_groups_that_nobody_must_prove_and_other_comments(tmp_path, capsys):
    code, lines, _ = say(tmp_path, capsys, "def test_a():  # proves S1-S3, F1, T6, N10, N8-9\n    pass\n")
    assert code == 0
    assert lines == ["S: 3 of 3 proved", "F: 1 of 1 proved", "T: T6 proved", "N: N8, N9, N10 proved"]
    text = "# This proves S9 of all.\nTEXT = '# proves S9'\ndef test_a():\n    pass\n"
    assert say(tmp_path, capsys, text)[::2] == (0, [])


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        ("def test_a():  # proves S1, S9\n    pass\n", ["test_planted.py:1: there is no feature S9."]),
        ("def test_a():  # proves N73\n    pass\n", ["test_planted.py:1: there is no feature N73."]),
        ("def test_a():  # proves S2-S4\n    pass\n", ["test_planted.py:1: there is no feature S4."]),
        ("def test_a():  # proves S3-S1\n    pass\n", ["test_planted.py:1: there is no feature S3-S1."]),
        (
            "\ndef test_a():  # proves s1\n    pass\n",
            ["test_planted.py:2: `proves` must be followed by features, such as S53, F9; got '# proves s1'."],
        ),
        (
            "def test_a():  # proves S1, s2\n    pass\n",
            ["test_planted.py:1: `proves` must be followed by features, such as S53, F9; got '# proves S1, s2'."],
        ),
        *(
            (text, [MISPLACED])
            for text in (
                "ROWS = [1]  # proves S1\n\ndef test_a():\n    pass\n",
                "# proves S1\n\ndef test_a():\n    pass\n",
                "# proves S1\nROWS = [1]\ndef test_a():\n    pass\n",
                "def helper():  # proves S1\n    pass\n",
            )
        ),
    ],
)
def test_what_is_refused(tmp_path, capsys, text, errors):
    code, _, found = say(tmp_path, capsys, text)
    assert (code, found) == (1, errors)


def test_the_table_and_what_pytest_does_not_collect_proves_nothing(tmp_path, capsys):
    text = "def test_a():  # proves S1, T6\n    pass\n@pytest.mark.deep\ndef test_b():  # proves S2\n    pass\n"
    assert say(tmp_path, capsys, text, "--table")[1][:5] == [
        "S1  the first: deeper/test_planted.py",
        "S2  the second: deeper/test_planted.py (in part)",
        "S3  the third: NOT PROVED",
        "F1  another: NOT PROVED",
        "T6: deeper/test_planted.py",
    ]
    code, _, errors = say(tmp_path, capsys, "def test_a():  # proves S1\n    pass\n", name="worker.py")
    assert code == 1 and "must stand at a test" in errors[0]


def test_the_list_is_whole():
    titles = proved.features(proved.FEATURES.read_text())
    assert list(titles) == [f"S{i}" for i in range(1, 131)] + [f"F{i}" for i in range(1, 91)]
    assert all(0 < len(title) <= 90 for title in titles.values())


def test_this_suite_holds_to_it_and_the_script_needs_neither_pytest_nor_jax():
    code = "import runpy, sys; sys.argv = [sys.argv[1]]\ntry: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    code += "except SystemExit as end: print(end.code, {'pytest', 'jax', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, proved.__file__], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["0 set()"], done.stderr
