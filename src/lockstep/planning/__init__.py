"""Measures the memory, time and traffic that a rank needs under each placement of a recipe, before it runs."""
