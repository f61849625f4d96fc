"""Parameters alone: from a run's checkpoints, and to and from the files of other libraries.

Start with `load.py`. Imports `checkpoint/`, whose runs it reads.
"""
