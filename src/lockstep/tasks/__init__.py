"""Tasks, which define the loss and the metrics of a model. Both are sums, so they can be added over micro-batches."""
