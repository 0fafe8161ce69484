"""cluster.yaml, and the variants for Google and for machines of one's own that its comments describe."""

from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parents[1] / "cluster.yaml"
ELSEWHERE = "# Elsewhere: "
GOOGLE, MACHINES = "# Google.", "# Machines of your own"


def shipped_config() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return loaded


def variant_config(beginning: str) -> dict[str, Any]:
    """The file with the sections that follow the comment with this beginning in place of its own."""
    lines = FILE.read_text(encoding="utf-8").partition(ELSEWHERE)[2].splitlines()
    (first,) = (number for number, line in enumerate(lines) if line.startswith(beginning))
    end = next((n for n in range(first + 1, len(lines)) if lines[n].startswith((GOOGLE, MACHINES))), len(lines))
    parts = [line.removeprefix("#") for line in lines[first:end] if line.startswith("#     ")]
    config = shipped_config() | yaml.safe_load("\n".join(parts))
    if beginning == MACHINES:
        del config["available_node_types"], config["head_node_type"]
    return config
