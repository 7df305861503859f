"""The folder of a run: what it keeps, how it is claimed, and which runs there are."""
