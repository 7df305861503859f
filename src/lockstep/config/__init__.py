"""The words a user types: recipe, placement and run, typed and validated."""
