"""Jobs of many processes: starting them, here or on a cluster, joining them, ending them.

Start with `join.py`. Imports the monitor.
"""
