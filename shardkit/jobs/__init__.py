"""What surrounds the processes of a job: the launcher, its restarts, the guard with its monitors, rendered jobs.

Start with `launch.py`. Only the command, and `sk.runtime` at the first use of `guard` or `launch`, import it: what a
training script calls is in `runtime/`.
"""
