"""A training loop of the user's own: the run, its steps, and the guards around its model."""
