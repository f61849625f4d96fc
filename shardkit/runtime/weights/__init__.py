"""Parameters alone: from a run's checkpoints, and from and to safetensors, the files of other libraries.

Start with `load.py`. Imports `checkpoint/`, whose runs it reads.
"""
