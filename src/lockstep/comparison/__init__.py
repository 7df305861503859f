"""Compares placements of a recipe: plans and trains them one after another, and shows the results."""
