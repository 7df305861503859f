"""Tasks: the loss of a model as a sum, and its metrics as sums of counts."""
