"""Queries this machine: its GPUs, kernels, precision, memory and limits."""
