"""Data: a corpus of bytes, batches of which each process loads its rows, global arrays from the data of processes.

Open `arrays.py` first. Imports meshes and layouts.
"""
