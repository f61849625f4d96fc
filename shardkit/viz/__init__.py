"""Pictures of programs, layouts, memory, schedules, meshes, arrays and measurements, with the extra [viz].

Start with `style.py`, the one look of all. Imports what the pictures are of: schedules, cost, analysis, and
what describes meshes and arrays as text.
"""

from shardkit.viz.bench import results
from shardkit.viz.curves import losses
from shardkit.viz.layouts import tree
from shardkit.viz.memories import memory, zero_memory
from shardkit.viz.places import array, mesh
from shardkit.viz.rooflines import roofline
from shardkit.viz.schedule import Box, boxes, draw, facts, figure, in_flight, title
from shardkit.viz.traffic import census, overlap

__all__ = [
    "Box",
    "array",
    "boxes",
    "census",
    "draw",
    "facts",
    "figure",
    "in_flight",
    "losses",
    "memory",
    "mesh",
    "overlap",
    "results",
    "roofline",
    "title",
    "tree",
    "zero_memory",
]
