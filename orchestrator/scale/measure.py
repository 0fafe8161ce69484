"""All measurements of scale, one after the other, each in a folder that is thrown away. Prints what is reached."""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from orchestrator.scale.crowd import crowd
from orchestrator.scale.figure import Figure
from orchestrator.scale.million import million_rows
from orchestrator.scale.planning import many_planned
from orchestrator.scale.trials import thousand_trials
from sampler.errors import InputError

PARTS: Mapping[str, Callable[[Path], list[Figure]]] = {
    "trials": thousand_trials,
    "few": lambda folder: [*crowd(folder / "1", actors=1), *crowd(folder / "8", actors=8)],
    "actors": crowd,
    "rows": million_rows,
    "plan": many_planned,
}


def measure(names: Sequence[str], *, as_json: bool) -> None:
    """The named parts, or all."""
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise InputError(f"--scale {unknown[0]}: {', '.join(PARTS)} are allowed")
    found: list[Figure] = []
    for name in names or PARTS:
        print(f"measuring {name}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="reuse-scale-", ignore_cleanup_errors=True) as folder:
            figures = PARTS[name](Path(folder))
        found += figures
        if not as_json:
            print(*(figure.line() for figure in figures), sep="\n", flush=True)
    if as_json:
        print(json.dumps([asdict(figure) | {"good": figure.good} for figure in found], indent=1))
