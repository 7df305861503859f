"""Turns a configuration into objects: checks it, and opens or builds the data, the model and the optimizer."""
