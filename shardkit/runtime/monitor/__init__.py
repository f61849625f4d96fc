"""What watches a process from beside it: a second, small process that outlives the first and never imports jax.

Each process of a job has one. They meet before jax starts, over the coordinator's port, and their connections stay
open: the monitor of process 0 hears from all, decides what went wrong and tells all. A thread could not do this: jax
ends a process from inside, by abort, when its coordinator is gone; a stopped process runs no thread; and code that
holds the interpreter's lock stops them all. Standard library only, so that it starts in hundredths of a second.

Start with `main.py`; `guard.py` and `client.py` are the side of the training process, and may import jax. The others
import each other only.
"""
