"""The training loop, evaluation, checkpoints, and the events that the loop yields."""
