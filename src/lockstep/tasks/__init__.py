"""Tasks, which define the loss and the metrics of a model as sums that can be added across micro-batches."""
