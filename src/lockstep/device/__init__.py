"""Facts of this machine: its cards, kernels, precision, memory and limits."""
