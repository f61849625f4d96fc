"""Pictures of schedules, meshes, arrays and measurements, with the extra [viz].

Start with `schedule.py`. Imports schedules, and what describes meshes and arrays as text.
"""

from shardkit.viz.bench import results
from shardkit.viz.boxes import Box, boxes, facts, in_flight, title
from shardkit.viz.places import array, mesh
from shardkit.viz.schedule import draw, figure

__all__ = ["Box", "array", "boxes", "draw", "facts", "figure", "in_flight", "mesh", "results", "title"]
