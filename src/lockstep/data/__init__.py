"""Where samples come from: one function for each source."""
