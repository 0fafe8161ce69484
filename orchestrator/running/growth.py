"""What the autoscaler of a joined cluster may bring, from the file that `ray up` leaves on the head. Imports no Ray.

Ray's own state knows the nodes that are there; a cluster that starts without workers would look as if it had no GPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FILE = Path("~/ray_bootstrap_config.yaml")  # as cluster.yaml names it to the head


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeType:
    """Machines of one kind, and how many of them there may be."""

    most: int
    resources: Mapping[str, float]

    def has(self, kind: str) -> float:
        return self.resources.get(kind, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """The kinds of workers, and how many there may be in all."""

    types: Sequence[NodeType] = ()
    workers: int = 0

    def largest(self, kind: str) -> float:
        """Of this resource, on one machine."""
        return max((each.has(kind) for each in self.types if each.most), default=0)

    def most(self, kind: str) -> float:
        """Of this resource on all workers, if those that have most of it are taken first."""
        found, left = 0.0, self.workers
        for each in sorted(self.types, key=lambda each: each.has(kind), reverse=True):
            taken = min(each.most, left)
            found, left = found + taken * each.has(kind), left - taken
        return found


def growth_of(path: Path) -> Growth:
    """None at all where there is no such file, or none that describes a cluster."""
    try:
        described = yaml.safe_load(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return Growth()
    if not isinstance(described, dict) or not isinstance(described.get("available_node_types"), dict):
        return Growth()
    head, workers = described.get("head_node_type"), int(described.get("max_workers") or 0)
    types = [_node_type(each, workers) for name, each in described["available_node_types"].items() if name != head]
    return Growth(types=types, workers=workers)


def _node_type(described: Mapping[str, Any], workers: int) -> NodeType:
    most = described.get("max_workers")
    return NodeType(most=workers if most is None else int(most), resources=described.get("resources") or {})
