"""Reports on runs: event sinks such as the console and TensorBoard, and views, pages and tables."""
