"""One moment of a sweep, and how fast its documents come in. Knows no terminal, no files and no Ray."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.watching.tally import Configuration, Totals

WINDOW = 300.0  # seconds a pace looks back, more if few documents came in them
STEP = 5.0  # seconds between the moments kept
ENOUGH = 20  # documents that make a pace steady; the first figure comes with FIRST
FIRST = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What a view shows; whoever runs the sweep gathers it."""

    sweep: str
    totals: tuple[Totals, ...]
    trials: int
    finished: int = 0
    failed: int = 0
    running: tuple[str, ...] = ()  # the labels of trials at work
    actors: int = 0
    started: int = 0  # workers that this run has made
    warm: int = 0

    @property
    def documents(self) -> int:
        return sum(totals.documents for totals in self.totals)

    @property
    def wanted(self) -> int:
        return sum(totals.wanted for totals in self.totals)


class Pace:
    """Documents per second and time left, from the moment this run's first document arrived.

    What came before it (models loading, warm-up) says nothing about the documents, nor does what an earlier run left
    in the folder. Documents of slow tasks count for more: each weighs what its configuration's took so far.
    """

    def __init__(self) -> None:
        self._before: int | None = None
        self._moments: deque[tuple[float, Mapping[Configuration, int]]] = deque()
        self._now = 0.0
        self._totals: tuple[Totals, ...] = ()

    def observe(self, at: float, totals: tuple[Totals, ...]) -> None:
        self._now, self._totals = at, totals
        documents = sum(line.documents for line in totals)
        if self._before is None:
            self._before = documents
        if documents > self._before and (not self._moments or at - self._moments[-1][0] >= STEP):
            self._moments.append((at, {line.configuration: line.documents for line in totals}))
        while len(self._moments) > 1 and at - self._moments[1][0] >= WINDOW and self._since(1) >= ENOUGH:
            self._moments.popleft()

    @property
    def documents_per_s(self) -> float | None:
        seconds = self._seconds()
        return self._since(0) / seconds if seconds else None

    @property
    def seconds_left(self) -> float | None:
        if self._totals and all(line.documents >= line.wanted for line in self._totals):
            return 0.0
        seconds, costs = self._seconds(), self._costs()
        if not seconds or not costs:
            return None
        then = self._moments[0][1]
        done = sum(costs[t.configuration] * (t.documents - then.get(t.configuration, 0)) for t in self._totals)
        missing = sum(costs[t.configuration] * max(0, t.wanted - t.documents) for t in self._totals)
        return missing / done * seconds if done > 0 else None

    def _since(self, moment: int) -> int:
        return sum(line.documents for line in self._totals) - sum(self._moments[moment][1].values())

    def _seconds(self) -> float | None:
        enough = self._moments and self._since(0) >= FIRST
        return self._now - self._moments[0][0] if enough else None

    def _costs(self) -> dict[Configuration, float]:
        """Seconds a document takes; a configuration without any takes after its task, a task after all."""
        overall = _cost(self._totals)
        if overall is None:
            return {}
        by_task: dict[str, list[Totals]] = {}
        for line in self._totals:
            by_task.setdefault(line.configuration.task, []).append(line)
        tasks = {task: _cost(tuple(lines)) or overall for task, lines in by_task.items()}
        return {line.configuration: _cost((line,)) or tasks[line.configuration.task] for line in self._totals}


def _cost(totals: tuple[Totals, ...]) -> float | None:
    documents = sum(line.documents for line in totals)
    return sum(line.seconds for line in totals) / documents or None if documents else None
