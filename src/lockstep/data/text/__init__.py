"""Text, as windows of tokens: from files, from token files of others' making, and what is shipped of it."""
