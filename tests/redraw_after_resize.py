"""A program: draws the view, waits until its input is closed, and draws it again in a terminal resized meanwhile."""

import sys
import time

from test_view import progress

from orchestrator.progress.view import REDRAW_SECONDS, SweepView

with SweepView() as view:
    view.update(progress())
    print("drawn", file=sys.__stderr__, flush=True)
    sys.stdin.read()
    time.sleep(2 * REDRAW_SECONDS)
    view.update(progress())
