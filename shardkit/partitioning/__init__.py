"""What every strategy shares: how leaves lie on a mesh, and how they get there and back.

Open `plan.py` first: a plan is data, three layouts for each leaf and one spec for the batch. `reshard.py` brings
parameters into a loss and gradients out of it. Imports collectives and what is below them; no strategy and no layer.
"""
