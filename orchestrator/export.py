"""`python -m orchestrator.export` is `reuse-sweep export`."""

from orchestrator.cli.__main__ import main

if __name__ == "__main__":
    main("export")
