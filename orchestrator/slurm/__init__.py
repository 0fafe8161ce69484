"""Runs sweeps as Slurm jobs: batch script, submission and state of jobs. The flags are in orchestrator.cli.slurm."""
