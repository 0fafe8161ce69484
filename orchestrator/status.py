"""`python -m orchestrator.status` is `reuse-sweep status`."""

from orchestrator.cli.__main__ import main

if __name__ == "__main__":
    main("status")
