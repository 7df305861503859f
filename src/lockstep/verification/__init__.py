"""Verification: runs the same training on several placements and reports the differences."""
