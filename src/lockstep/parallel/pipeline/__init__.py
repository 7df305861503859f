"""The engine of pipelines: how a model is cut, who holds which stage, and what travels when."""
