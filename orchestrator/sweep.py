"""`python -m orchestrator.sweep` is `reuse-sweep sweep`."""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback if Ctrl-C comes during the next import

    from orchestrator.cli.__main__ import main

    main("sweep")
