"""A thousand trials of one document, in a real sweep of a very small model: what each costs beside its decoding."""

from pathlib import Path

from orchestrator.planning.settings import PolicyGrid
from orchestrator.progress.timeline import timeline
from orchestrator.store import Store
from tools.faults.case import write_files
from tools.scale.figure import Figure, spent_by

OVERHEAD = ("scoring", "waiting", "finishing", "between")  # neither decoding nor calibration


def thousand_trials(folder: Path, *, trials: int = 1000) -> list[Figure]:
    policies = PolicyGrid().policies
    documents = -(-trials // len(policies))
    write_files(folder, documents=documents)
    flags = ["--tasks", "gsm8k", "--policies", ",".join(policies), "--limit", documents, "--shard-size", 1]
    flags += ["--max-new-tokens", 8, "--fewshot", 0, "--model", folder / "model", "--data", folder / "data"]
    flags += ["--actors", 2, "--cpus-per-actor", 0.5, "--out", folder / "out", "--name", "s"]
    flags += ["--no-dashboard", "--quiet"]
    spent = spent_by("orchestrator.sweep", [str(flag) for flag in flags])
    found = timeline(Store(folder / "out" / "s").trials().values())
    assert found is not None
    assert found.trials == documents * len(policies), found.trials
    each = {part: 1000 * found.parts[part] / found.trials for part in found.parts}
    return [
        Figure(
            what=f"{found.trials:,} trials of one document: overhead of each",
            value=sum(each[part] for part in OVERHEAD),
            unit="ms",
            wanted=60,
        ),
        *(Figure(what=f"  of which {part}", value=each[part], unit="ms") for part in OVERHEAD),
        Figure(what="  beside that, calibration", value=each["calibration"], unit="ms"),
        Figure(what="  the whole command", value=spent.wall, unit="s"),
    ]
