"""A million rows are analysed in 1.2 GB and reported in 1.5 GB; the time bounds are ten times the usual time."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from analysis_tables import Truth, World, asked, described, draw, grid
from simulated_sweep import Simulation, write_compacted_sweep, write_sweep

from orchestrator.store import Store
from tools.scale.figures import measure_command

ROOT = Path(__file__).parent.parent
ANALYSE = """
import json, re, sys, time
import pyarrow as pa
import pyarrow.parquet as pq
from orchestrator.analysis import COLUMNS, analyse, as_json, condense
folder = sys.argv[1]
batches = pq.ParquetFile(f"{folder}/rows.parquet").iter_batches(columns=list(COLUMNS))
rows = pa.concat_tables([condense(pa.Table.from_batches([batch])) for batch in batches])
documents = {"minerva_math": pq.read_table(f"{folder}/documents.parquet")}
request = json.load(open(f"{folder}/sweep.json"))
started = time.process_time()
found = analyse(rows, documents, request)
seconds = time.process_time() - started
text = json.dumps(as_json(found.tasks), allow_nan=False)
# Not getrusage: its peak is handed down from the process that started this one.
peak = int(re.search("VmHWM:\\s+([0-9]+) kB", open("/proc/self/status").read())[1])
print(json.dumps({
    "rows": found.rows, "seconds": seconds, "size": len(text), "outcome": found.tasks[0].verdict.outcome,
    "gigabytes": peak / 1e6,
}))
"""


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
def test_a_million_rows(tmp_path: Path) -> None:
    world = World(
        documents=112_000,
        subtasks=57,
        task="minerva_math",
        policies=grid(Truth(lost=0.03, won=0.01, speedup=1.35)),
        length_noise=0.1,
    )
    rows = draw(world)
    place = rows.schema.get_field_index("text")
    long = pa.repeat(pa.scalar("a long answer, " * 30), rows.num_rows)
    pq.write_table(
        rows.set_column(place, rows.schema.field(place), long), tmp_path / "rows.parquet", row_group_size=50_000
    )
    pq.write_table(described(world)[world.task], tmp_path / "documents.parquet")
    (tmp_path / "sweep.json").write_text(json.dumps(asked(world)))
    ran = subprocess.run(
        [sys.executable, "-c", ANALYSE, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = json.loads(ran.stdout)
    assert found["rows"] == 1_008_000
    assert found["outcome"] == "confirmed"
    assert found["seconds"] < 100, found
    assert found["gigabytes"] < 1.2, found
    assert found["size"] < 2_000_000, found


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("shard_size", [10, 1000])  # 100,548 compacted trials, and 1,080 with files of their own
def test_a_report_of_a_million_rows(tmp_path: Path, shard_size: int) -> None:
    """Three tasks in six repeats."""
    documents = {"gsm8k": 1_319, "minerva_math": 5_000, "mmlu": 12_300}
    write = write_compacted_sweep if shard_size < 1000 else write_sweep
    folder = write(tmp_path / "s", Simulation(documents=documents, repeats=6, shard_size=shard_size, actors=8))
    assert Store(folder).rows(columns=["doc_id"], verify=False).num_rows == 1_005_426
    if write is write_compacted_sweep:  # the other has no stored totals, as sweeps of older versions
        spent = measure_command("orchestrator.status", [str(folder)])
        print(spent)
        assert spent.cpu_seconds < 20, spent
    spent = measure_command("orchestrator.report", [str(folder)])
    print(spent)
    assert spent.cpu_seconds < 250, spent
    assert spent.memory_mb < 1_500, spent
    assert (folder / "report.html").stat().st_size < 5_000_000


def test_an_analysis_needs_neither_ray_nor_torch() -> None:
    """Not even by way of what it imports: a report starts quickly and runs where there is no model."""
    asked_for = "import sys, orchestrator.analysis; print(sorted({'ray', 'torch', 'lm_eval'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", asked_for], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
