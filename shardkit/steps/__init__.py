"""The builders of train and evaluation steps, and the state that a step takes and returns. Start with `train.py`.

Imports what one device does, plans and pipelines.
"""
