"""Layouts of parameters, gradients and the optimizer's state: replicated on each rank, or sharded in rows."""
