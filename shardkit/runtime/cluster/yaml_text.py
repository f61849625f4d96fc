"""YAML that every parser reads the same way."""

from __future__ import annotations

import math
from typing import Any

import yaml


class Text(str):
    """Text that is written in quotes: YAML parsers differ on which plain words are numbers (1e-3, 1_000, 12:30)."""


def dumped(*documents: Any) -> str:
    """The documents as YAML, in the order of their entries."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=math.inf)


class _Dumper(yaml.SafeDumper):
    """Writes `Text` in quotes, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(Text, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))
