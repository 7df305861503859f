"""Images: their sources, and how they are decoded, augmented and normalized."""
