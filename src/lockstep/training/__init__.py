"""The loop, evaluation, checkpoints and the events they yield."""
