"""Data: a corpus of bytes, batches of which each process loads its rows, global arrays from what processes hold.

Start with `arrays.py`. Imports meshes and layouts.
"""
