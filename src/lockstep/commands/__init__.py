"""The commands, with one file for each. Only commands read the configuration and print."""
