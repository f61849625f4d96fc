"""Pictures of programs, memory, schedules, meshes, arrays and measurements, with the extra [viz].

Start with `style.py`, the one look of all. Imports what the pictures are of: schedules, tables of collectives, cost,
analysis, meshes.
"""

from shardkit.viz.bench import results
from shardkit.viz.curves import losses
from shardkit.viz.memories import memory
from shardkit.viz.places import array
from shardkit.viz.schedule import draw, facts, figure, title
from shardkit.viz.tables import table
from shardkit.viz.traffic import census, overlap

__all__ = ["array", "census", "draw", "facts", "figure", "losses", "memory", "overlap", "results", "table", "title"]
