"""Tables: rows of numbers and of names, from CSV and Parquet files."""
