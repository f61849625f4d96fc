"""Optimizers that read a plan, because they need to know the places of a leaf's parts: `muon`.

Start with `muon.py`. All others are optax's. Imports plans and collectives.
"""
