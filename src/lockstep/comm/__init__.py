"""Communication between ranks: sums, rows, point to point. Only comm/ and ranks/ use torch.distributed."""
