"""Sequences that are cut into chunks, and shared out."""
