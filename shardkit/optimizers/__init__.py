"""Optimizers that read a plan, because what they compute of a leaf depends on where its parts are: `muon`.

Start with `muon.py`. All others are optax's. Imports plans and collectives.
"""
