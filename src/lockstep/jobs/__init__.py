"""Starts jobs with a launcher, submits them to a cluster, and reads their run folders."""
