"""Communication between ranks: reductions, exchanges of rows, and point-to-point transfers.

Only comm/ and ranks/ use torch.distributed.
"""
