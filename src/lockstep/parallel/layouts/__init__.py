"""Layouts of parameters, gradients and optimizer state: replicated on each rank, or sharded by rows."""
