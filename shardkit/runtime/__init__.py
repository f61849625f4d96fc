"""What surrounds a training run: data, and later processes, guards and checkpoints."""
