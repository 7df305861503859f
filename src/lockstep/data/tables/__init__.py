"""Table datasets. A sample is a row of numbers and text, from a CSV or Parquet file, or from the library `datasets`."""
