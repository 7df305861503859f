"""A saved run as files of other programs: each to_*.py writes a format, which is checked by loading it back."""
