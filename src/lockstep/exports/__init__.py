"""Exports a saved run to file formats of other libraries. A to_*.py module per format; each export is loaded back."""
