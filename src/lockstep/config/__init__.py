"""The configuration that you write: the sections recipe, placement and run, typed and validated."""
