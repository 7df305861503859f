"""Pure functions: sample order, random numbers, reduction trees and learning rates.

No torch.distributed, files, clocks or logging.
"""
