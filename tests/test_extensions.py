"""Adds a policy, a decode setting and a reported row column to a copy of the project, in the files the docs name."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from orchestrator.store import Store

ROOT = Path(__file__).parent.parent
MAX_FILES = 4
POLICY = '''"""`rest=R_layers`: the share R of the positions whose state changed most goes through the layers."""

from dataclasses import dataclass
from typing import ClassVar

from sampler.plan import CheckpointSignal, LayerPlan, StepContext, compute_all
from sampler.policies.base import NarrowingRule, Rule, format_decimal, parse_share


@dataclass(frozen=True, kw_only=True, slots=True)
class RestRule(NarrowingRule):
    mode: ClassVar[str] = "rest"
    signal: ClassVar[CheckpointSignal] = CheckpointSignal.INPUT_CHANGE

    @classmethod
    def parse(cls, value: str, options: list[str]) -> Rule:
        return cls(share=parse_share(value, "rest"))

    def __str__(self) -> str:
        return f"rest={format_decimal(self.share)}"

    def plan(self, context: StepContext) -> LayerPlan:
        return self.narrow(context, {}) if context.past else compute_all(self.depth)
'''
EXTENSIONS = {  # what is added: per file, the text to find and what replaces it
    "policy": {
        "sampler/policies/rest.py": ("", POLICY),
        "sampler/policies/__init__.py": (
            "import HalfRule, PeriodicRule, SkipRule, StaleRule\n",
            "import HalfRule, PeriodicRule, SkipRule, StaleRule\nfrom sampler.policies.rest import RestRule\n",
            '    "skip": SkipRule.parse,\n',
            '    "skip": SkipRule.parse,\n    "rest": RestRule.parse,\n',
        ),
    },
    "decode setting": {
        "sampler/records.py": (
            "    max_new_tokens: int = 256\n",
            "    max_new_tokens: int = 256\n    step_limit: int = 0  # tokens that one step may reveal; 0: no limit\n",
        ),
        "sampler/decode.py": (
            "self.rule.choose([traces[position] for position in masked]):",
            "self.rule.choose([traces[position] for position in masked])[: self.settings.step_limit or None]:",
        ),
        "orchestrator/core/configuration.py": (
            "    @classmethod\n    def from_mapping",
            '    step_limit: int = _decode_setting(DEFAULTS.step_limit, slug="limit{}")\n\n'
            "    @classmethod\n    def from_mapping",
        ),
        "orchestrator/planning/settings.py": (
            "    model: str = setting(",
            "    step_limit: tuple[int, ...] = _decode_axis(\n"
            '        "step_limit", minimum=0, metavar="N,N", help="tokens that one step may reveal; 0: all"\n    )\n\n'
            "    model: str = setting(",
        ),
    },
    "row column": {
        "orchestrator/store/schema.py": (
            '        pa.field("text", pa.string()),\n',
            '        pa.field("text", pa.string()),\n        pa.field("answer_characters", pa.int64()),\n',
        ),
        "orchestrator/running/worker.py": (
            '        "token_ids": list(result.token_ids),\n',
            '        "token_ids": list(result.token_ids),\n        "answer_characters": len(result.text or ""),\n',
        ),
        "orchestrator/analysis/columns.py": ('    "replayed",\n', '    "replayed",\n    "answer_characters",\n'),
        "orchestrator/report/tables.py": (
            "WORK_COLUMNS: tuple[Column, ...] = (\n",
            "WORK_COLUMNS: tuple[Column, ...] = (\n"
            '    Column("letters", lambda row: number_cell(row.per_document("answer_characters"))),\n',
        ),
    },
}


def extend(root: Path) -> None:
    for name in ("orchestrator", "sampler", "tasks"):
        (root / name).symlink_to(ROOT / name) if name == "tasks" else copy(ROOT / name, root / name)
    for edits in EXTENSIONS.values():
        for file, changes in edits.items():
            path = root / file
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            for old, new in zip(changes[::2], changes[1::2], strict=True):
                assert text.count(old) == 1 or not old, f"{file} has {text.count(old)} times {old!r}"
                text = text.replace(old, new) if old else new
            path.write_text(text, encoding="utf-8")


def copy(source: Path, target: Path) -> None:
    for path in source.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            (target / path.relative_to(source)).write_bytes(path.read_bytes())


def command(root: Path, name: str, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    done = subprocess.run(
        [sys.executable, "-m", f"orchestrator.{name}", *arguments],
        cwd=root, env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_an_extension_touches_few_files_and_the_docs_name_them(extension: str) -> None:
    files = EXTENSIONS[extension]
    assert len(files) <= MAX_FILES
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for file in files:
        named = file if (ROOT / file).exists() else "sampler/policies/"
        assert named in page, f"docs/architecture.md does not name {named}"


@pytest.mark.slow
def test_the_extended_project_runs_reports_and_reads_older_sweeps(tmp_path: Path) -> None:
    extend(tmp_path)
    flags = [
        "--tasks",
        "gsm8k",
        "--policies",
        "k1,k2_middle,rest=0.5_middle",
        "--no-replicate",
        "--step-limit",
        "0,1",
        "--limit",
        "2",
    ]
    command(tmp_path, "sweep", *flags, "--model", "tiny", "--actors", "1", "--no-dashboard", "--name", "extended")
    folder = tmp_path / "results" / "extended"
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "letters" in page
    assert "rest=0.5_middle step limit 1" in page
    assert "step limit 1" in command(tmp_path, "status", str(folder))
    rows = Store(folder).rows()  # this version ignores the columns it does not know
    assert len(rows) == 3 * 2 * 2
    assert pc.count_distinct(rows["trial_id"]).as_py() == 3 * 2
    passes = {}
    for path in folder.glob("trials/*/rows.parquet"):
        own = pq.read_table(path).to_pylist()
        passes[own[0]["policy"], own[0]["step_limit"]] = sum(row["passes_small"] for row in own)
    assert passes["k1", 1] > passes["k1", 0]
    with tarfile.open(ROOT / "tests" / "formats" / "v1-finished.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    command(tmp_path, "report", str(tmp_path / "finished"))
    assert "letters" in (tmp_path / "finished" / "report.html").read_text(encoding="utf-8")
