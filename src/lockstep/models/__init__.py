"""Models that we ship, and how any other is found by name."""
