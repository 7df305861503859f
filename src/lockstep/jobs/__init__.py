"""Jobs from outside: started by a launcher, given to Slurm's queue, and what their run folders hold."""
