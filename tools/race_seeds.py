"""Compares races with the full sweep: python -m tools.race_seeds --seeds 20 --out DIR

Runs the full sweep of the bundled model once and a race for each seed, nine configurations each. Prints the documents
that each race used and every verdict that contradicts the full sweep (confirmed by one and rejected by the other).
Existing sweeps are continued, so an interrupted comparison can be repeated.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from orchestrator.store import Store

CONTRADICTION = {"confirmed", "rejected"}
Verdicts = dict[tuple[str, str], str]  # by task and configuration


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="number of races")
    parser.add_argument("--tasks", default="gsm8k,minerva_math", help="tasks of every sweep")
    parser.add_argument("--out", type=Path, required=True, help="directory of the sweeps")
    options = parser.parse_args()
    full = _run_sweep(options.out, "full", options.tasks)
    expected, all_documents = _verdicts(full), _count_documents(full)
    print(f"full sweep: {all_documents:,} documents, {_count_outcomes(expected)}", flush=True)
    shares, contradictions = [], 0
    for seed in range(options.seeds):
        folder = _run_sweep(options.out, f"race-{seed}", options.tasks, "--race", "--seed", str(seed))
        verdicts, share = _verdicts(folder), _count_documents(folder) / all_documents
        wrong = {key for key in expected if {expected[key], verdicts.get(key, "")} == CONTRADICTION}
        shares.append(share)
        contradictions += len(wrong)
        outcomes = _count_outcomes(verdicts)
        print(f"seed {seed}: {100 * share:.0f} % of the documents, {outcomes}; contradictions: {sorted(wrong)}")
    if shares:
        print(f"median {100 * statistics.median(shares):.0f} % of the documents; {contradictions} contradictions")


def _run_sweep(out: Path, name: str, tasks: str, *flags: str) -> Path:
    common = ["--model", "tiny", "--data", "bundled", "--out", str(out), "--name", name, "--no-dashboard", "--quiet"]
    subprocess.run([sys.executable, "-m", "orchestrator.sweep", "--tasks", tasks, *common, *flags], check=True)
    return out / name


def _verdicts(folder: Path) -> Verdicts:
    verdicts = {}
    for path in sorted(folder.glob("summaries/*/*/summary.json")):
        verdict = json.loads(path.read_text(encoding="utf-8"))["verdict"]
        if verdict is not None:
            verdicts[path.parent.parent.name, path.parent.name] = verdict["outcome"]
    return verdicts


def _count_documents(folder: Path) -> int:
    return len(Store(folder).rows(columns=["doc_id"]))


def _count_outcomes(verdicts: Verdicts) -> str:
    outcomes = list(verdicts.values())
    return ", ".join(f"{outcomes.count(name)} {name}" for name in ("confirmed", "rejected", "undecided"))


if __name__ == "__main__":
    main()
