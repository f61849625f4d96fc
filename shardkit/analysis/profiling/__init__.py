"""Readers of a run: profiles and traces, with their collectives.

Start with `profile.py`. Imports cost and `analysis/hlo`, whose collectives are timed.
"""
