"""Exports saved runs to file formats of other libraries, and checks each export. Each to_*.py module is a format."""
