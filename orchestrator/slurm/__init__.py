"""Sweeps as Slurm jobs: the flags, the script, its submission and how it stands. Starts no Ray here."""
