"""Run folders: their files, how a start claims a folder, and how to find existing runs."""
