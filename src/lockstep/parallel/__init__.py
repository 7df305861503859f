"""Engines and layouts: how all strategies train a model on several ranks."""
