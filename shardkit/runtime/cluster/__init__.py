"""Jobs of many processes: starting them on this machine or a cluster, connecting them, ending them.

Start with `join.py`. Imports the monitor, meshes, collectives and the description of a job.
"""
