"""The builders of train and evaluation steps, and the state that a step takes and returns. Start with `train.py`.

Imports on_device, plans and pipelines.
"""
