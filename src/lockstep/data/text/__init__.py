"""Text: what is shipped of it."""
