"""Optimizers that read a plan, because what they compute of a leaf depends on where its parts are: `muon`.

All others are optax's. Imports plans and collectives.
"""
