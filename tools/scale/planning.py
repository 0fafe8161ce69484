"""A hundred thousand trials, planned and told by --dry-run."""

from pathlib import Path

from orchestrator.planning.settings import PolicyGrid
from tools.faults.case import write_files
from tools.scale.figure import Figure, spent_by


def many_planned(folder: Path, *, trials: int = 100_000) -> list[Figure]:
    documents = -(-trials // len(PolicyGrid().policies))
    write_files(folder, documents=documents)
    flags = ["--tasks", "gsm8k", "--shard-size", "1", "--dry-run", "--fewshot", "0", "--actors", "1"]
    flags += ["--model", str(folder / "model"), "--data", str(folder / "data"), "--out", str(folder / "out")]
    spent = spent_by("orchestrator.sweep", flags)
    return [
        Figure(what=f"{trials:,} trials planned and dry-run", value=spent.wall, unit="s", wanted=10),
        Figure(what="  of the processor", value=spent.cpu, unit="s"),
        Figure(what="  memory", value=spent.memory, unit="MB"),
    ]
