"""Engines and layouts: how a model is trained on several ranks. All strategies use them."""
