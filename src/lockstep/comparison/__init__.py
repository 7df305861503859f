"""One recipe under several placements: planned, trained one after the other, and what came of it."""
