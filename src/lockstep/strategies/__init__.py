"""The strategies a user can name: one file each, and the file name is the name."""
