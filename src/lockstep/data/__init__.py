"""Datasets, which fetch samples by index, and the loader, which assembles the samples into micro-batches."""
