"""What one device does in a step, inside `shard_map`: parameters in, loss and gradient, gradients out.

Start with `seam.py`: its functions issue the collectives of every plan. Imports plans, and collectives.
"""
