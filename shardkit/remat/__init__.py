"""Rematerialization: layers whose weights are gathered where they are used, and what a backward pass computes again.

Start with `layers.py`: `gathered` and `scan_layers`. `recompute.py` holds the policies. Imports collectives and
partitioning.
"""
