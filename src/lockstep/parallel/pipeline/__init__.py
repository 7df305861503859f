"""The pipeline engine: splitting a model into stages, placing the stages, and communication between them."""
