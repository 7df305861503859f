"""Imports configuration files of other frameworks, and reports how each key was translated."""
