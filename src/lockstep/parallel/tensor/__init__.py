"""Slicing of tensors: products cut into chunks of features, which ranks share."""
