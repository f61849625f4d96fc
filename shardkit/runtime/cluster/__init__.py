"""The processes of a job: how one joins the others, waits for them, and leaves.

Start with `join.py`. Imports the channel, meshes, collectives and the description of a job.
"""
