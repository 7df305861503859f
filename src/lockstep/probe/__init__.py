"""What of the user's code would make the numbers depend on the placement."""
