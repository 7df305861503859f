"""Measures the memory, time and traffic of a rank for each placement of a recipe, before training."""
