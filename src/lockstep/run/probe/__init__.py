"""Looks at the user's own data, model and loss in one process, for what makes numbers depend on the placement."""
