"""Rematerialization: layers that gather their weights where they use them, and policies for the backward pass.

Start with `layers.py`: `gathered` and `scan_layers`. `recompute.py` holds the policies. Imports collectives and
on_device.
"""
