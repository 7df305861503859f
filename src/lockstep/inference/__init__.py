"""Inference with a saved run. Predictions only need the checkpoint. Evaluations also open the data of the run."""
