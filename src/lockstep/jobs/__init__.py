"""Starts jobs with a launcher, submits jobs to a cluster, and reads run folders."""
