"""`python -m orchestrator.slurm` is `reuse-sweep slurm`."""

from orchestrator.cli.__main__ import main

if __name__ == "__main__":
    main("slurm")
