"""Shared by all packages: texts of messages, files, locks, user code and the rank of a process."""
