"""Verification: placements run side by side, and what differs between them."""
