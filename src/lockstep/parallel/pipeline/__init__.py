"""The pipeline engine: splits a model into stages, places the stages on ranks, and communicates between them."""
