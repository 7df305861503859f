"""A check-up of the machine and of what lies between the ranks: what was found, what it leads to, what to do."""
