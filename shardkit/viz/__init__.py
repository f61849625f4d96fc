"""Drawings of schedules, with the extra [viz].

Start with `schedule.py`. Imports schedules only.
"""

from shardkit.viz.schedule import Box, boxes, draw, facts, figure, in_flight, title

__all__ = ["Box", "boxes", "draw", "facts", "figure", "in_flight", "title"]
