"""Tasks, which define the loss and the metrics of a model as sums, so that they can be added over micro-batches."""
