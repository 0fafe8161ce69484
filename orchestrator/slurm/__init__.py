"""Sweeps as Slurm jobs: flags, batch script, submission and status."""
