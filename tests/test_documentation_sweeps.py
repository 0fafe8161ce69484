"""Runs the sweeps in README and docs to their end, and checks the README's finding against its command."""

import re
from itertools import combinations
from pathlib import Path

import pytest
from page_commands import OURS, README, run_page_command

from orchestrator.store import Store

ELSEWHERE = ("--dry-run", "--model Efficient", "$")  # no rows, the Hub, and settings of a cluster; these are parsed
SWEEPS = [one for one in OURS if "sweep --tasks" in one and not any(word in one for word in ELSEWHERE)]
FINDING = README.partition("\n## The finding")[2].partition("\n## ")[0]
[COMMAND] = re.findall(r"```sh\n(.*)\n```", FINDING)
SUBSETS = ("first", "middle", "last")


@pytest.mark.slow
def test_sweeps_run_as_written(tmp_path: Path) -> None:
    """One after the other in one folder, as a reader would: the larger one extends the smaller."""
    assert COMMAND in SWEEPS
    for command in SWEEPS:
        if command != COMMAND:
            assert "report.html" in run_page_command(command, tmp_path)
    rows = Store(tmp_path / "results" / "tiny").rows(columns=["task", "doc_id"])
    assert len(rows) == 9 * len(set(zip(*(column.to_pylist() for column in rows.columns), strict=True)))


@pytest.mark.slow
def test_the_finding_is_what_its_command_gives(tmp_path: Path) -> None:
    run_page_command(COMMAND, tmp_path)
    rows = Store(tmp_path / "results" / "reuse-modes").rows(columns=["policy", "doc_id", "token_ids", "correct"])
    answers: dict[str, dict[str, list[int]]] = {}
    correct: dict[str, int] = {}
    for row in rows.to_pylist():
        answers.setdefault(row["policy"], {})[row["doc_id"]] = row["token_ids"]
        correct[row["policy"]] = correct.get(row["policy"], 0) + row["correct"]

    def accuracies(option: str) -> str:
        return " / ".join(f"{correct[f'k2_{subset}{option}'] / 100:.1%}"[:-1] for subset in SUBSETS) + " %"

    def alike(option: str) -> list[int]:
        names = [f"k2_{subset}{option}" for subset in SUBSETS]
        return sorted(sum(answers[a][doc] == answers[b][doc] for doc in answers[a]) for a, b in combinations(names, 2))

    finding = " ".join(FINDING.split())
    assert alike(".output") == [100, 100, 100]
    assert f"output reuse gives {accuracies('.output')} and the same answer to every document" in finding
    fewest, _, most = alike("")
    assert f"residual reuse gives {accuracies('')}, and any two subsets give the same answer" in finding
    assert f"to only {fewest} to {most} documents of 100" in finding
