"""Pipeline schedules as data: one file per schedule, one table to print, check, simulate and run.

| schedule | bubble | in flight | chunks | placement |
|---|---|---|---|---|
| `gpipe` | (p-1) (F + B) | m | 1 | loop |
| `one_f_one_b` | (p-1) (F + B) | p | 1 | loop |
| `interleaved` | (p-1) (F + B) / v | p + (p-1)/v | v | loop |
| `breadth_first` | (p-1) (F + B) / v | m | v | loop |
| `lockstep` | (p-1) (F + B) / v | 2p - 1 with one chunk | v | loop |
| `zero_bubble_h1` | (p-1) (F + B - 2W) | p | 1 | loop |
| `zero_bubble_v` | 0 within each device's span | p | 2 | v |
| `dualpipe_v` | (p-1) (F&B + B - 3W) / 2 | p + 1/2 | 2 | v |

`search` looks for the fastest under given costs and memory.

The bubbles hold for the sizes and costs in each file; for others call `Schedule.simulate`. Read any other schedule from
a CSV file with `Schedule.from_csv`.

Start with `gpipe.py`, the shortest, then `base.py`. Imports argument checks only; no jax.
"""

from shardkit.schedules.base import Schedule
from shardkit.schedules.breadth_first import breadth_first
from shardkit.schedules.dualpipe_v import dualpipe_v
from shardkit.schedules.gpipe import gpipe
from shardkit.schedules.interleaved import interleaved
from shardkit.schedules.lockstep import lockstep
from shardkit.schedules.one_f_one_b import one_f_one_b
from shardkit.schedules.search import search
from shardkit.schedules.zero_bubble_h1 import zero_bubble_h1
from shardkit.schedules.zero_bubble_v import zero_bubble_v

__all__ = [
    "Schedule",
    "breadth_first",
    "dualpipe_v",
    "gpipe",
    "interleaved",
    "lockstep",
    "one_f_one_b",
    "search",
    "zero_bubble_h1",
    "zero_bubble_v",
]
