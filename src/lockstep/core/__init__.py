"""Arithmetic: order, randomness, trees and learning rates. No torch.distributed, files, clocks or logging."""
