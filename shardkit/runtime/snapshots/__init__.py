"""Snapshots of a training state in the memory of hosts, from which a job that lost a process or a host resumes.

Start with `snapshots.py`. Imports checkpoints, for their records and the portable form of a state.
"""
