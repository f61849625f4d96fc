"""Pictures of arrays, schedules and tables of collectives, with the extra [viz].

Start with `style.py`, the one look of all. Imports the subjects of the pictures: meshes, schedules, tables of
collectives.
"""

from shardkit.viz.places import array
from shardkit.viz.schedule import draw, figure
from shardkit.viz.tables import table

__all__ = ["array", "draw", "figure", "table"]
