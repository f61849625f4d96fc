"""Jobs of many processes: starting them, here or on a cluster, joining them, ending them.

Open `join.py` first. Imports the monitor.
"""
