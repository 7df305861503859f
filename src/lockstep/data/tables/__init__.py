"""Tables: rows of numbers and text from CSV and Parquet files."""
