"""Rematerialization: layers whose weights are gathered where they are used, and what a backward pass computes again.

Open `layers.py` first: `gathered` and `scan_layers`. `recompute.py` holds the policies. Imports collectives and
partitioning.
"""
