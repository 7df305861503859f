"""Text as windows of tokens: from text files, from token files of other programs, and from the text that we ship."""
