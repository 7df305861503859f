"""What placements of a recipe would take: memory, time and traffic of a rank, measured before any of them runs."""
