"""`python -m orchestrator.report` is `reuse-sweep report`."""

from orchestrator.cli.__main__ import main

if __name__ == "__main__":
    main("report")
