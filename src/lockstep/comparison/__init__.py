"""Compares placements of a recipe: plans them, trains on them sequentially, and shows the results."""
