"""Sinks for events: console, JSON lines, TensorBoard."""
