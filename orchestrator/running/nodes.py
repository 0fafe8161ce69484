"""Which nodes can run workers. A node where three set-ups in a row failed is excluded for the rest of the run."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from orchestrator.running.stop import Aborted

MAX_FAILED_SETUPS = 3  # in a row, on one node


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """`node_id` is Ray's; several nodes may share a host name."""

    node_id: str
    host: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedSetup:
    """A worker that failed before it was ready to decode."""

    node: Node
    reason: str
    is_input_error: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerCounts:
    """Workers of this run. Created by the result actor, read by `NodeHealth`."""

    alive: int  # ready, and not known to have died
    set_up: Mapping[str, int]  # successful set-ups, by node id


class NodeHealth:
    """Counts failed set-ups and decides which nodes to exclude, and when the sweep cannot continue."""

    def __init__(self) -> None:
        self.excluded: set[str] = set()  # node ids; read whenever Ray places a worker
        self._failures: dict[str, list[FailedSetup]] = {}  # by node id, since its last successful set-up
        self._set_up_before: dict[str, int] = {}
        self._reported: set[tuple[str, str]] = set()

    def exclude(self, failure: FailedSetup) -> str:
        """Excludes a node that failed before the first worker was placed; returns a warning."""
        self.excluded.add(failure.node.node_id)
        self._failures[failure.node.node_id] = [failure]
        self._reported.add((failure.node.node_id, failure.reason))
        return _warning(failure)

    def record(self, failure: FailedSetup, counts: WorkerCounts, usable: Collection[str]) -> list[str]:
        """Records a failed set-up and returns notices for the user; raises Aborted if no node can run the sweep.

        `usable`: ids of the nodes alive that are large enough for a worker.
        """
        node = failure.node
        if counts.set_up.get(node.node_id, 0) > self._set_up_before.get(node.node_id, 0):
            self._failures.pop(node.node_id, None)
        self._set_up_before[node.node_id] = counts.set_up.get(node.node_id, 0)
        failures = self._failures.setdefault(node.node_id, [])
        failures.append(failure)
        if failure.is_input_error and not counts.alive and self._is_same_everywhere(failure, usable):
            raise Aborted(failure.reason)
        notices = []
        if (node.node_id, failure.reason) not in self._reported:
            self._reported.add((node.node_id, failure.reason))
            notices.append(_warning(failure))
        if len(failures) == MAX_FAILED_SETUPS:
            self.excluded.add(node.node_id)
            notices.append(f"node {node.host} is not used again in this run: {len(failures)} set-ups failed in a row")
        self.check(counts, usable)
        return notices

    def check(self, counts: WorkerCounts, usable: Collection[str]) -> None:
        """Raises Aborted if every usable node is excluded and no worker is left."""
        if usable and not counts.alive and set(usable) <= self.excluded:
            raise Aborted(*failure_sentences([failure for failures in self._failures.values() for failure in failures]))

    def _is_same_everywhere(self, failure: FailedSetup, usable: Collection[str]) -> bool:
        """Whether another node failed for the same reason, or there is no other node."""
        others = set(usable) - {failure.node.node_id}
        return not others or any(
            earlier.reason == failure.reason
            for node_id, failures in self._failures.items()
            for earlier in failures
            if node_id != failure.node.node_id
        )


def failure_sentences(failures: Iterable[FailedSetup]) -> list[str]:
    """One sentence for each distinct reason, with the nodes it was seen on."""
    hosts: dict[str, dict[str, None]] = {}
    for failure in failures:
        hosts.setdefault(failure.reason, {})[failure.node.host] = None
    return [
        f"no worker could be set up on node{'s' * (len(where) > 1)} {', '.join(where)}: {reason}"
        for reason, where in hosts.items()
    ]


def _warning(failure: FailedSetup) -> str:
    return f"warning: node {failure.node.host} could not set up a worker: {failure.reason}"
