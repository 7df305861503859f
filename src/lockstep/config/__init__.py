"""The user's configuration: parsing, validation, and typed sections for recipe, placement and run."""
