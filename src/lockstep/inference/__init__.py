"""Inference with a saved run. Predictions only need the checkpoint. Evaluations also need the data of the run."""
