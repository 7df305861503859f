"""Verbs on models, shared by the strategies."""
