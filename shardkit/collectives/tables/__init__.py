"""Collectives as tables: who sends which chunk to whom, step by step; checked, printed, timed on links and executed.

| table | steps of an all_gather | devices |
|---|---|---|
| `ring` | n - 1, in both directions n // 2 | any |
| `halving`, `bine` | log2(n) | powers of two |
| `bruck`, `pat` | ceil(log2(n)) | any |
| `torus` | d (s - 1) for d dims of s | a torus |
| `tree` (all_reduce only) | 2 log2(n), about | any |

A derivative runs the transposed table. Start with `published.py`, then `table.py`; `execute.py` runs any of them.
Imports cost, and single files such as `checks.py` and `permute.py`.
"""

from shardkit.collectives.tables.links import torus_links
from shardkit.collectives.tables.messages import Send
from shardkit.collectives.tables.plan_files import from_mscclpp, to_mscclpp
from shardkit.collectives.tables.published import bine, bruck, halving, pat, ring, torus, tree
from shardkit.collectives.tables.table import SendTable

__all__ = [
    "Send",
    "SendTable",
    "bine",
    "bruck",
    "from_mscclpp",
    "halving",
    "pat",
    "ring",
    "to_mscclpp",
    "torus",
    "torus_links",
    "tree",
]
