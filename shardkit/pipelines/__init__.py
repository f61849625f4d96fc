"""What runs a pipeline: the table of a schedule, executed by one program on all devices or by one program per stage.

Start with `run.py`, the loop over ticks, then `ops.py`, what is computed in a tick; `grad_fn.py` is what users get of
them. `in_sequence.py` is the loss without a schedule, `device_put.py` the pipeline of several programs. The plan `pp`
and the value `pipeline` are in `strategies/pipeline.py`. Imports schedules, on_device, layers and remat.
"""
