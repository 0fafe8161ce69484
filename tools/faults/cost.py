"""What a sweep that is killed and continued costs, against one that is not. Measured once for each campaign."""

import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from orchestrator.running.stop import Aborted
from orchestrator.store import Store
from tools.faults.scene import LONGEST, LOOK, Scene


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """One command from its start to its end, in seconds."""

    total: float
    before: float  # the first trial: Python, Ray, loading, warm-up
    rows: int  # written by it


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """An undisturbed sweep, and another that was killed once and continued."""

    whole: Timed
    killed_after: float
    rows_kept: int
    rest: Timed

    @property
    def extra(self) -> float:
        """Seconds that the end came later for having been killed."""
        return self.killed_after + self.rest.total - self.whole.total

    @property
    def beyond(self) -> float:
        """What is left of it without the second start-up: work that was lost with the kill, and the clock's noise."""
        return self.extra - self.rest.before

    def lines(self) -> list[str]:
        whole, rest = self.whole, self.rest
        return [
            f"undisturbed: {whole.rows} rows in {whole.total:.1f} s, of which {whole.before:.1f} s until the first "
            "trial (Python, Ray, loading, warm-up)",
            f"killed after {self.killed_after:.1f} s with {self.rows_kept} rows on disk; continuing took "
            f"{rest.total:.1f} s for the other {rest.rows}, of which {rest.before:.1f} s until the first trial",
            f"killed and continued against undisturbed: {self.extra:+.1f} s; without the second start-up "
            f"{self.beyond:+.1f} s",
        ]


def timed(scene: Scene) -> Timed:
    """Runs the scene's command to its end."""
    rows = scene.rows()
    clock, began = time.time(), time.monotonic()
    scene.start()
    try:
        code = scene.command.wait(LONGEST)
    finally:
        scene.end()
    total = time.monotonic() - began
    if code != 0:
        raise Aborted(f"a sweep that nobody disturbed ended with {code}: {scene.command.text[-1500:]}")
    first = min(_begun(scene.folder, clock), default=clock + total)
    return Timed(total=total, before=first - clock, rows=scene.rows() - rows)


def measure(whole: Timed, scene: Scene) -> Cost:
    """Kills the scene's command when about half of the rows are there."""
    began = time.monotonic()
    scene.start()
    try:
        while scene.running and scene.rows() < whole.rows // 2:
            time.sleep(LOOK)
        after = time.monotonic() - began
    finally:
        scene.end()
    kept = scene.rows()
    return Cost(whole=whole, killed_after=after, rows_kept=kept, rest=timed(scene))


def _begun(folder: Path, clock: float) -> list[float]:
    """When attempts began, of those since then."""
    trials = Store(folder).trials().values()
    starts = [attempt["started_at"] for facts in trials for attempt in facts["attempts"] if "started_at" in attempt]
    found = [datetime.fromisoformat(start).timestamp() for start in starts]
    return [start for start in found if start >= clock]
