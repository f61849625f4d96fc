"""Checkpoints of a training run, on orbax: restored on any mesh, plan and number of processes.

Start with `checkpoints.py`. Imports the monitor, training, `data/` for checksums, and testing for its law.
"""
