"""Datasets, which fetch samples by index, and the loader that turns them into micro-batches."""
