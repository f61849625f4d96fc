"""Readers of a run: profiles and traces with their collectives, and measured scaling.

Open `profile.py` first. Imports cost and `analysis/hlo`, whose collectives are timed.
"""
