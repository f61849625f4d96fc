"""Runs the notebooks, and stores what they print: `make notebooks`, or of some alone `make notebooks ONLY="04 10"`.

    python tests/support/notebooks.py 04 10            # run these, and store their outputs
    python tests/support/notebooks.py --compare 04     # run it, and compare with what is stored

A notebook runs in a process of its own, in the folder of the notebooks. After its last cell, the solutions of its
exercises run: the Python blocks inside `<details>`; a text block that follows one is what it prints. A warning is an
error, and so is anything else on stderr. A code cell with the tag `varies` prints what differs between two runs.
"""

import argparse
import copy
import json
import os
import re
import resource
import sys
from base64 import b64decode, b64encode
from io import BytesIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
SOLUTION = re.compile(r"<details>(.*?)</details>", re.S)
BLOCK = re.compile(r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", re.S)
LINE = re.compile(r"(?<=\.py:)\d+")  # of the package: another one with every change of a file
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


def paths(chosen: list[str]) -> list[Path]:
    """The notebooks in their order; of some numbers alone, those."""
    return [path for path in sorted(FOLDER.glob("*.ipynb")) if not chosen or path.stem[:2] in chosen]


def read(path: Path) -> dict[str, Any]:
    """A notebook as its JSON, each text joined."""
    notebook: dict[str, Any] = json.loads(path.read_text())
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"])
    return notebook


def solutions(notebook: dict[str, Any]) -> list[tuple[str, str]]:
    """The Python blocks of all solutions, each with what it is said to print."""
    texts = [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
    return [block for text in texts for hidden in SOLUTION.findall(text) for block in BLOCK.findall(hidden)]


def said(cell: dict[str, Any]) -> str:
    """What a code cell has printed, and the text of its value; of a picture nothing."""
    parts = []
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        if not any(kind.startswith("image/") for kind in data):
            parts.append("".join(output.get("text", data.get("text/plain", ""))))
    return "".join(part if part.endswith("\n") else part + "\n" for part in parts if part)


def alike(text: str, other: str) -> bool:
    """Whether two texts are the same, but for numbers of lines and the last digits of numbers that are not whole."""
    text, other = LINE.sub("", text), LINE.sub("", other)
    if re.split(NUMBER, text) != re.split(NUMBER, other):
        return False
    pairs = zip(NUMBER.findall(text), NUMBER.findall(other), strict=True)
    return all(a == b or (not whole(a) and not whole(b) and near(a, b)) for a, b in pairs)


def whole(number: str) -> bool:
    """Whether it is written without a point or an exponent."""
    return not set(".e") & set(number)


def near(a: str, b: str) -> bool:
    """Within 2%, or a rounding of zero."""
    x, y = (float(each.replace(",", "")) for each in (a, b))
    return abs(x - y) <= max(0.02 * max(abs(x), abs(y)), 1e-4)


def run(path: Path) -> dict[str, Any]:
    """The notebook with new outputs, also in the text blocks of its solutions.

    Raises:
        RuntimeError: a cell fails, or writes to stderr.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    found = read(path)
    own = len(found["cells"])
    together = copy.deepcopy(found)
    for code, _ in solutions(found):
        together["cells"].append({"cell_type": "code", "source": code, "metadata": {}, "outputs": []})
    for index, cell in enumerate(together["cells"]):  # ids that stay the same from run to run
        cell["id"] = f"cell-{index}"
        cell["metadata"] = {"tags": tags} if (tags := cell["metadata"].get("tags")) else {}
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
    together["nbformat"], together["nbformat_minor"] = 4, 5
    together["metadata"] = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    executed = nbformat.from_dict(together)
    client = NotebookClient(
        executed, timeout=600, record_timing=False, coalesce_streams=True, resources={"metadata": {"path": str(FOLDER)}}
    )
    try:
        client.execute()
    except CellExecutionError as error:
        raise RuntimeError(f"{path.name}: {error}") from None
    notebook: dict[str, Any] = json.loads(nbformat.writes(executed))
    for index, cell in enumerate(notebook["cells"]):
        cell["source"] = "".join(cell["source"])
        for output in cell.get("outputs", ()):
            if output.get("name") == "stderr":
                raise RuntimeError(f"{path.name}, cell {index}: it wrote to stderr: {''.join(output['text'])}")
            if "image/png" in (data := output.get("data", {})):
                data["image/png"] = small("".join(data["image/png"]))
    printed = iter([said(cell) for cell in notebook["cells"][own:]])
    del notebook["cells"][own:]

    def renewed(block: re.Match[str]) -> str:
        out = next(printed)
        code = f"```python\n{block[1]}```"
        return f"{code}\n\n```text\n{out}```" if out else code

    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = SOLUTION.sub(lambda hidden: BLOCK.sub(renewed, hidden[0]), cell["source"])
    return notebook


def small(picture: str) -> str:
    """A PNG in base64 with at most 64 colors: a quarter of its size, and the same to the eye."""
    from PIL import Image  # comes with matplotlib

    out = BytesIO()
    image = Image.open(BytesIO(b64decode(picture))).convert("RGB")
    image.quantize(64, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return b64encode(out.getvalue()).decode() + "\n"


def differences(stored: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What two runs of one notebook print that is not alike."""
    pairs = [
        (f"cell {index}", said(cell), said(new))
        for index, (cell, new) in enumerate(zip(stored["cells"], found["cells"], strict=True))
        if "varies" not in cell["metadata"].get("tags", ())
    ]
    both = zip(solutions(stored), solutions(found), strict=True)
    pairs += [(f"solution {index}", old, new) for index, ((_, old), (_, new)) in enumerate(both, 1)]
    return [f"{place} printed\n{new}where this is stored\n{old}" for place, old, new in pairs if not alike(old, new)]


def environment() -> None:
    """What the processes of the notebooks find: the suite's compiler flags, this package, a terminal of 100 columns."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    for name in ("NPROC", "HYPOTHESIS_PROFILE", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "MPLBACKEND"):
        os.environ.pop(name, None)
    from support.compiling import QUICK  # the same in both tiers, as bits depend on it

    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    os.environ |= {"XLA_FLAGS": QUICK, "PYTHONPATH": path, "COLUMNS": "100", "TF_CPP_MIN_LOG_LEVEL": "2"}


def main(words: list[str] | None = None) -> int:
    """Runs the notebooks of these numbers, or all; 1 if one fails or prints something else than it is said to."""
    parser = argparse.ArgumentParser(description="Runs the notebooks and stores their outputs.")
    parser.add_argument("--compare", action="store_true", help="store nothing: compare with what is stored")
    parser.add_argument("numbers", nargs="*", help="such as 04 10; none: all")
    args = parser.parse_args(words)
    environment()
    failed = 0
    for path in paths(args.numbers):
        before = _seconds()
        try:
            found = run(path)
        except RuntimeError as error:
            failed += 1
            print(error)
            continue
        if args.compare:
            different = differences(read(path), found)
            failed += bool(different)
            print(*(f"{path.name}, {each}" for each in different), sep="\n", end="\n" if different else "")
        else:
            path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        print(f"{path.name}: {_seconds() - before:.0f} s of CPU, {len(json.dumps(found)) / 1000:.0f} kB")
    return int(failed > 0)


def _seconds() -> float:
    """CPU seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    raise SystemExit(main())
