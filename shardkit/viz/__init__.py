"""Drawings of schedules; needs the extra [viz]."""

from shardkit.viz.schedule import Box, boxes, draw, facts, figure, in_flight, title

__all__ = ["Box", "boxes", "draw", "facts", "figure", "in_flight", "title"]
