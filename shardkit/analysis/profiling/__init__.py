"""What reads a run: profiles and traces with their collectives, and measured scaling.

Start with `profile.py`. Imports cost and `analysis/hlo`, whose collectives are the rows that are given times.
"""
