"""Text datasets from text files, token files, or the text included in Lockstep. A sample is a window of tokens."""
