"""Gauges: what they are set to, that Ray exports them, and that deploy/grafana.json asks for nothing else."""

import json
import re
import shutil
import signal
import subprocess
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sweep_process import ROOT, SweepProcess
from synthetic_folder import rows_with_defaults
from test_totals import configuration, row

from orchestrator.core.totals import totals_of
from orchestrator.progress.progress import Progress
from orchestrator.running.dashboard import (
    ACCURACY,
    DONE,
    GAUGES,
    PREFIX,
    SPEED,
    TAGS,
    WANTED,
    SweepMetrics,
    gauge_tags,
    gauge_values,
    trials_by_state,
)

PROMQL = {"sum", "max", "by", "deriv", "label_values"}
SAMPLE = re.compile(r"(\w+)\{(.*)\} \S+")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def test_no_two_configurations_share_their_tags() -> None:
    rows = [row("a", "k1"), row("b", "k1", threshold=0.9), row("c", "k1", block_cache=False), row("d", "k2_last")]
    tags = [gauge_tags("demo-01234567", line) for line in totals_of(rows_with_defaults(rows))]
    assert len({tuple(one.items()) for one in tags}) == 4
    assert all(tuple(one) == TAGS for one in tags)
    assert tags[0] | {"settings": ""} == {"sweep": "demo-01234567", "task": "gsm8k", "policy": "k1", "settings": ""}


def test_what_is_not_known_has_no_value() -> None:
    done, unscored = totals_of(rows_with_defaults([row("a", "k1"), row("b", "k2_last", correct=None, tokens=0)]))
    (waiting,) = totals_of(rows_with_defaults([]), {configuration("gsm8k", "k3_last"): 10})
    assert gauge_values(done).keys() >= {DONE, WANTED, ACCURACY, SPEED}
    assert gauge_values(unscored).keys() == {DONE, WANTED}
    assert gauge_values(waiting) == {DONE: 0, WANTED: 10}
    progress = Progress(sweep="demo", totals=(done, unscored, waiting), trials=3)
    SweepMetrics("demo").update(progress)


def test_states_add_up_to_all_trials() -> None:
    progress = Progress(sweep="demo", totals=(), trials=10, finished=4, failed=1, running=("a", "b"))
    assert trials_by_state(progress) == {"finished": 4, "failed": 1, "running": 2, "pending": 3}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana.json").read_text(encoding="utf-8"))
    return loaded


def expressions(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def names_in(expression: str) -> set[str]:
    """Metrics, labels and functions of a PromQL expression, without strings and durations."""
    bare = re.sub(r'"[^"]*"|\[[^]]*\]', "", expression)
    return set(re.findall(r"[a-z_][a-z_0-9]*", bare, flags=re.IGNORECASE))


def test_the_dashboard_asks_only_for_gauges_that_exist(dashboard: dict[str, Any]) -> None:
    metrics = {f"{PREFIX}{name}": set(tags) for name, (_, tags) in GAUGES.items()}
    shown: set[str] = set()
    for expression in expressions(dashboard):
        names = names_in(expression)
        asked = names & metrics.keys()
        assert asked, expression
        labels = set.intersection(*(metrics[name] for name in asked))
        assert names - asked - PROMQL <= labels, expression
        shown |= asked
    assert shown == metrics.keys(), "every gauge is shown"


def test_the_dashboard_is_whole(dashboard: dict[str, Any]) -> None:
    panels, variables = dashboard["panels"], {variable["name"] for variable in dashboard["templating"]["list"]}
    assert variables == {"datasource", "sweep", "task"}
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, f"{panel['title']} lies over another panel"
        assert place["x"] + place["w"] <= 24
        taken |= cells
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        for target in panel["targets"]:
            legend, expression = target["legendFormat"], target["expr"]
            kept = set(re.findall(r"by \(([^)]*)\)", expression)[0].split(", ")) if "{{" in legend else set()
            assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= kept, "a legend names labels that are left"
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard))) - {"__all"}
    assert used == variables


# A running sweep


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SweepProcess, Path]]:
    """A race that lasts longer than the tests, and the directory in which its Ray keeps its sessions."""
    out = tmp_path_factory.mktemp("out")
    policies = ("--policies", "k1,k2_last,k2_first,k3_last", "--no-replicate", "--shard-size", "4", "--actors", "1")
    race = ("--race", "--speedup", "1.05", "--margin", "20")  # near what the policies reach: it is not soon decided
    flags = ("--model", "tiny", "--data", "bundled", "--tasks", "gsm8k", *policies, *race)
    with tempfile.TemporaryDirectory(prefix="m-", dir="/tmp") as temporary:  # Ray's sockets need a short path
        run = SweepProcess(out, out, *flags, TMPDIR=temporary)
        try:
            yield run, Path(temporary)
        finally:
            run.process.send_signal(signal.SIGINT)
            run.wait(code=None)


def samples(address: str) -> Iterator[tuple[str, dict[str, str]]]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=900) as answer:
        for line in answer.read().decode().splitlines():
            found = SAMPLE.fullmatch(line)
            if found:
                yield found[1], dict(LABEL.findall(found[2]))


@pytest.mark.slow
def test_ray_exports_every_gauge_with_its_tags(running: tuple[SweepProcess, Path]) -> None:
    """As Prometheus finds and reads them: through Ray's service discovery file."""
    run, temporary = running

    def exported() -> dict[str, dict[str, str]] | None:
        files = list(temporary.glob("reuse-*/r/session_*/prom_metrics_service_discovery.json"))
        entries = [entry for file in files for entry in json.loads(file.read_text())]
        try:
            of_all = (sample for entry in entries for target in entry["targets"] for sample in samples(target))
            found = {name: labels for name, labels in of_all if "reuse" in name}
        except OSError:  # it is not listening yet
            return None
        return found if len(found) == len(GAUGES) else None

    found = run.wait_until(exported, "all gauges were exported")
    assert found.keys() == {f"{PREFIX}{name}" for name in GAUGES}
    for name, (_, tags) in GAUGES.items():
        labels = found[f"{PREFIX}{name}"]
        assert labels.keys() >= set(tags), name
        assert labels["sweep"].startswith("s-")
        assert labels.get("task", "gsm8k") == "gsm8k"


@pytest.fixture
def prometheus(running: tuple[SweepProcess, Path], tmp_path: Path) -> Iterator[str]:
    """The address of a Prometheus that uses the configuration that Ray writes."""
    if shutil.which("prometheus") is None:
        pytest.skip("Prometheus is not installed (Debian: apt-get install prometheus)")
    run, temporary = running
    pattern = "reuse-*/r/session_[0-9]*/metrics/prometheus/prometheus.yml"
    configuration = run.wait_until(lambda: next(temporary.glob(pattern), None), "Ray wrote a configuration")
    log = tmp_path / "log"
    command = ["prometheus", f"--config.file={configuration}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    with log.open("w") as errors:
        process = subprocess.Popen([*command, "--web.listen-address=127.0.0.1:0"], stderr=errors, cwd=tmp_path)
    try:
        listening = re.compile(r'msg="?Listening on"? address=(\S+)')
        yield run.wait_until(lambda: listening.search(log.read_text()), "Prometheus listened")[1]
    finally:
        process.terminate()
        process.wait()


@pytest.mark.slow
def test_prometheus_answers_every_question_of_the_dashboard(
    running: tuple[SweepProcess, Path], prometheus: str, dashboard: dict[str, Any]
) -> None:
    def values(expression: str) -> list[Any]:
        asked = re.sub(r"\$(sweep|task)", ".+", expression)
        query = urllib.parse.urlencode({"query": asked})
        with urllib.request.urlopen(f"http://{prometheus}/api/v1/query?{query}", timeout=900) as answer:
            result: list[Any] = json.load(answer)["data"]["result"]
        return result

    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            found = running[0].wait_until(partial(values, target["expr"]), f"{panel['title']} had values")
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert all(one["metric"][label] for one in found), panel["title"]
