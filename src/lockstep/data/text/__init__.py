"""Text datasets: windows of tokens from text files, token files or an included text, and conversations."""
