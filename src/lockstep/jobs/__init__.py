"""Starts jobs with a launcher, submits jobs to a cluster, and reads the state of runs from run folders."""
