"""Executes a run: starts the ranks, opens each rank, trains or evaluates, and writes events and checkpoints."""
