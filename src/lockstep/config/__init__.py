"""The configuration that the user writes, validated and typed. Its sections are recipe, placement and run."""
