"""Drawings of schedules, with the extra [viz].

Start with `schedule.py`. Imports schedules only.
"""

from shardkit.viz.boxes import Box, boxes, facts, in_flight, title
from shardkit.viz.schedule import draw, figure

__all__ = ["Box", "boxes", "draw", "facts", "figure", "in_flight", "title"]
