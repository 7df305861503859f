"""Executes a run: starts and opens the ranks, trains or evaluates, and writes events and checkpoints."""
