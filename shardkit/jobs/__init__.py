"""What surrounds the processes of a job: the launcher, its restarts, the guard with its monitors, rendered jobs.

Start with `launch.py`. Imports `runtime/`, which has what a training script calls; nothing but the command imports it,
and `sk.runtime` at the first use of `guard` or `launch`.
"""
