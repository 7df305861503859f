"""Turns a configuration into the objects it names: runs its checks, and opens data, model and optimizer."""
