"""Imports configurations of other frameworks, and reports how each key was translated."""
