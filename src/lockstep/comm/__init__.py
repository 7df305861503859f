"""Communication between ranks: reductions, all-to-all exchanges, and point-to-point transfers.

Only comm/ and ranks/ use torch.distributed.
"""
