"""Jobs of many processes: starting them on this machine or a cluster, connecting them, ending them.

Open `join.py` first. Imports the monitor.
"""
