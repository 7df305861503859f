"""Engines and layouts: the training of a model on many ranks, shared by all strategies."""
