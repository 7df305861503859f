"""Checks the machine, and the network between the ranks. Each finding has a consequence and a remedy."""
