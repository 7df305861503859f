"""Shared by all packages: message texts, files, locks, user code, and the rank of a process."""
