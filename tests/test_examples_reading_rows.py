"""The Python examples in docs/sweeps.md that read the rows of a sweep with other programs."""

import ast
import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from simulated_sweep import Simulation, write_sweep

PAGE = (Path(__file__).parents[1] / "docs" / "sweeps.md").read_text(encoding="utf-8")
TEXT = PAGE.partition("\n## Reading rows\n")[2].partition("\n## ")[0]
BLOCKS = dict(re.findall(r"\n([^\n]*):\n\n```python\n(.*?)```", TEXT, re.DOTALL))
SIMULATION = Simulation(documents={"gsm8k": 20}, policies=("k1_first", "k2_middle"), shard_size=10)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    write_sweep(home / "results" / "demo", SIMULATION)
    return home


@pytest.mark.parametrize("name", BLOCKS)
def test_rows_open_in(name: str, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setitem(os.environ, "HF_HOME", str(tmp_path))
    if "duckdb" in BLOCKS[name]:
        pytest.importorskip("duckdb")
    assert len(ast.parse(BLOCKS[name]).body) == 2
    found: dict[str, Any] = {}
    exec(BLOCKS[name], found)
    rows = found["rows"]
    if "GROUP BY" in BLOCKS[name]:
        assert {row[1] for row in rows} == {"k1_first", "k2_middle"}
        return
    table = rows if isinstance(rows, pa.Table) else None
    policies = table["policy"].to_pylist() if table is not None else list(rows["policy"])
    assert sorted(policies) == ["k1_first"] * 20 + ["k2_middle"] * 20


def test_every_program_has_an_example() -> None:
    assert len(BLOCKS) == 5
