"""What runs the jobs of a comparison: worker processes on this machine, a Ray cluster, or SLURM."""
