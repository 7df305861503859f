"""Arithmetic: order, randomness, trees and rates. No torch.distributed, files, clocks or logging."""
