"""Compares placements of a recipe: plans and trains them one after the other, and shows the results."""
