"""Arrays and states moved to another layout, mesh or plan: start with `reshard.py`. Imports steps, for their state."""
