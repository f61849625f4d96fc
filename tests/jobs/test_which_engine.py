"""A wrong field in a job on docs/howto/which_engine.md is found; tests/jobs/test_engines.py holds the page as it is."""

import copy
import re
from pathlib import Path

import pytest
import yaml

from support import schemas

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "which_engine.md"
BLOCKS = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.S | re.M)
PARSED = [document for block in BLOCKS for document in yaml.safe_load_all(block)]
OBJECTS = {document["kind"]: document for document in PARSED if "kind" in document}


def mappings(document, path=()):
    """The path of each object that has a schema; labels and limits may hold any name."""
    if isinstance(document, dict):
        yield path
        for name, value in document.items():
            if name not in ("labels", "limits", "selector"):
                yield from mappings(value, (*path, name))
    elif isinstance(document, list):
        for index, value in enumerate(document):
            yield from mappings(value, (*path, index))


@pytest.mark.check
@pytest.mark.parametrize("kind", ["Service", "Job", "TrainJob"])
def test_a_wrong_field_is_found_wherever_it_stands(kind):
    """A schema that drops what it does not know would pass any page."""
    schemas.validate(OBJECTS[kind])
    for path in mappings(OBJECTS[kind]):
        wrong = copy.deepcopy(OBJECTS[kind])
        here = wrong
        for each in path:
            here = here[each]
        here["sharkit"] = "1"
        try:
            schemas.validate(wrong)
        except Exception:  # each schema has its own
            continue
        pytest.fail(f"{kind}: sharkit was not found at {path}")
