"""Code that all packages share: messages, files, locks, user code, and the rank of a process."""
