"""Image datasets, and functions that decode, crop, augment and normalize images."""
