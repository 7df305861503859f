"""What ranks send each other: sums, rows, point to point. torch.distributed is used here and in ranks/ alone."""
