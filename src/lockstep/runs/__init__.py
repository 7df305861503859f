"""Run folders: their files, how a run claims its folder, and how to find existing runs."""
