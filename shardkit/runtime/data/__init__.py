"""Data: a corpus of bytes, batches (each process loads its rows), global arrays from the data of processes.

Start with `arrays.py`. Imports layouts, the barrier of `cluster/` and the words of the monitor.
"""
