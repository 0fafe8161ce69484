"""Draws on the standard output, waits for its input to end, and draws again: a test resizes the terminal in between."""

import sys
import time

from test_view import progress

from orchestrator.progress.view import SweepView

with SweepView() as view:
    view.update(progress())
    print("drawn", file=sys.__stderr__, flush=True)
    sys.stdin.read()
    time.sleep(0.3)
    view.update(progress())
