"""A run: from a configuration to things, one rank's part, and everything in its folder."""
