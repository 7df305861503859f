"""What is learned: a model, its loss as a sum, and its metrics as counts."""
