"""Checks the machine and the network between the ranks. Each finding has its consequence and its remedy."""
