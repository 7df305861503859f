"""The launchers we detect: one file each, pure, and never torch."""
