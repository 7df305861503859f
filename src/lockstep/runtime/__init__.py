"""The door to torch.distributed, devices, processes and signals."""
