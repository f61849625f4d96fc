"""Arrays and states moved to another layout, mesh or plan. Start with `reshard.py`. Imports steps, for their state."""
