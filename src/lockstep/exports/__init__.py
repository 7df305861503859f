"""Exports a saved run to file formats of other libraries, with a to_*.py module per format, and checks the export."""
