"""What one device does in a step, inside `shard_map`: parameters in, loss and gradient, gradients out.

Start with `seam.py`, whose functions issue the collectives of every plan. Imports plans, and collectives.
"""
