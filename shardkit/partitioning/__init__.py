"""What all strategies share: plans, the layouts of leaves, and the resharding of parameters and gradients.

Start with `plan.py`: a plan is data, three layouts for each leaf and one spec for the batch. `reshard.py` reshards
parameters into a loss and gradients out of it. Imports collectives and what they import; no strategy and no layer.
"""
