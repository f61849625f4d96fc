"""Parameters alone, from a run's checkpoints. Start with `load.py`. Imports `checkpoint/`, whose runs it reads."""
