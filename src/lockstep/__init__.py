"""Lockstep: train a recipe on any placement with the same numbers."""

__version__ = "0.1.0"
