"""The commands: one file each; the only readers of config and the only printers."""
