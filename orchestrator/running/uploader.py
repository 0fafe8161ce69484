"""Copies a sweep to its --upload URL: in a thread while trials run, and once more at the end.

The thread only reads trials that the store has finished, so a slow or failing upload delays no row. The last pass
copies what the thread missed, and so does the next run of the same command.
"""

import sys
import threading
import time
from collections.abc import Callable

from orchestrator.store import StoreError
from orchestrator.store.upload import RemoteCopy

POLL_SECONDS = 5.0
MAX_PAUSE_SECONDS = 60.0  # between attempts of an upload that fails
MAX_POLLING_SHARE = 0.05  # of the time, for finding finished trials
FINAL_PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)  # between attempts after the sweep has ended
JOIN_TIMEOUT_SECONDS = 2.0  # for the thread, if the sweep was interrupted


class UploadIncomplete(StoreError):
    """All rows are on disk, but the copy lacks some."""


class Uploader:
    """Copies finished trials while it is entered. With `copy=None` it does nothing."""

    def __init__(self, copy: RemoteCopy | None, note: Callable[[str], None], *, poll: float = POLL_SECONDS) -> None:
        self._copy, self._note, self._poll = copy, note, poll
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)

    def __enter__(self) -> "Uploader":
        if self._copy is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ended.set()
        if self._copy is not None:
            self._thread.join(None if kind is None else JOIN_TIMEOUT_SECONDS)

    def _run(self) -> None:
        assert self._copy is not None
        pause, warned = 0.0, False
        while not self._ended.wait(pause):
            began = time.monotonic()
            problem = self._copy.copy_finished(self._ended.is_set).problem
            if not problem:
                pause = max(self._poll, (time.monotonic() - began) / MAX_POLLING_SHARE)
                continue
            pause = min(MAX_PAUSE_SECONDS, max(self._poll, 2 * pause))
            if not warned:
                self._note(f"warning: upload failed ({problem}); the sweep continues and the upload is retried")
            warned = True


def finish_upload(copy: RemoteCopy, *, failed: int = 0) -> None:
    """Completes the copy; raises UploadIncomplete if that fails repeatedly. `failed` trials are part of the message."""
    print(f"uploading to {copy.url}", flush=True)
    outcome = copy.copy_all()
    for pause in FINAL_PAUSES_SECONDS:
        if not outcome.missing:
            break
        print(f"warning: upload failed ({outcome.problem}); next try in {pause:.0f} s", file=sys.stderr, flush=True)
        time.sleep(pause)
        outcome = copy.copy_all()
    if outcome.missing:
        trials = f"{failed} trials failed, and " if failed else "all rows are on disk, but "
        raise UploadIncomplete(f"{trials}the copy at {copy.url} lacks {outcome} ({outcome.problem})")
    print(copy.url)
