"""The monitor: a second, small process per process of a job, which outlives it and never imports jax.

The monitors connect before jax starts, over the coordinator's port, and stay connected: that of process 0 collects the
status of all, decides what went wrong and tells the others. A thread could not do this: jax aborts a process when its
coordinator is gone, a stopped process runs no thread, and code that holds the interpreter's lock stops them all. It
uses the standard library only, so it starts in hundredths of a second.

Start with `main.py`; `guard.py` runs in the training process, and may import jax. What a process
and its monitor share is in `runtime/channel/`.
"""
