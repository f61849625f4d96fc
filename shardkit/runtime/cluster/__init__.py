"""The processes of a job: their description, and how one joins the others, waits for them, and leaves.

Start with `join.py`; `config.py` describes a job. Imports the channel, meshes, collectives and strategies.
"""
