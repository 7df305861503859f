"""Text datasets. A sample is a window of tokens, from text files, token files, or the text that Lockstep ships."""
