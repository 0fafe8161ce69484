"""The whole command on Ray: a sweep, the same again, more of it. Sweeps that are disturbed are in test_sweep_faults."""

import http.client
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from small_sweep import write_model_and_data
from sweep_process import SECRET, SweepProcess, is_loopback, listening, stored_rows

from orchestrator.running.driver import load_callback
from orchestrator.store import Store
from sampler import InputError

FLAGS = ("--tasks", "gsm8k", "--policies", "k1,k1_first,k2_middle", "--max-new-tokens", "40", "--shard-size", "3")
PRIVATE = re.compile(r"(/\S*/reuse-\w+)/r/session_")
NOBODY = 65534
REPLY_SECONDS = 60
RAY_METHODS = [
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.CoreWorkerService/PushTask",
    "/ray.rpc.ReporterService/CpuProfiling",
    "/ray.rpc.LogService/ListLogs",
]
HERE = ("--actors", "2", "--no-dashboard")


def logs_of_sweeps() -> Iterator[tuple[Path, bytes]]:
    """Ray's, of those that run now; a sweep that ends meanwhile takes its logs with it."""
    for top in Path("/tmp").glob("reuse-*"):
        for folder, _, names in os.walk(top):  # which does not mind that a folder is gone
            for path in (Path(folder) / name for name in names if name.endswith(".log")):
                with suppress(FileNotFoundError):
                    yield path, path.read_bytes()


def writable_by_others(folder: Path) -> Iterator[Path]:
    """Files and directories that another user can reach and write to."""
    mode = folder.lstat().st_mode
    if mode & stat.S_IWOTH and not stat.S_ISLNK(mode) and not stat.S_ISSOCK(mode):
        yield folder
    if stat.S_ISDIR(mode) and mode & stat.S_IXOTH:
        for path in folder.iterdir():
            yield from writable_by_others(path)


def what_a_stranger_reaches(private: Path, token: Path, results: Path) -> str | None:
    """What another account prints that tries to read and to plant; None if this test cannot become another one."""
    if os.getuid() != 0:
        return None
    script = f"""
        cat {token} 2>/dev/null
        ls {private} {private}/r 2>/dev/null
        for place in {private} {private}/r {private}/r/session_*/artifacts {token.parent} {results} {results}/trials; do
            touch $place/planted 2>/dev/null && echo $place/planted
        done
        exit 0
    """
    command = ["/bin/sh", "-c", script]
    done = subprocess.run(command, user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def answers_without_token(port: int) -> set[str]:
    """Statuses of all of Ray's gRPC methods at a port, or of HTTP requests; health checks and metrics are left out."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/jobs/", timeout=REPLY_SECONDS) as reply:
            return set() if reply.url.endswith("/metrics") or b"# HELP" in reply.read() else {str(reply.status)}
    except urllib.error.HTTPError as error:
        return {str(error.code)}
    except (OSError, http.client.HTTPException):
        pass  # not HTTP/1
    found = set()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for method in RAY_METHODS:
            call = channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
            try:
                call(b"", timeout=REPLY_SECONDS)
                found.add("OK")
            except grpc.RpcError as error:
                found.add(error.code().name)  # type: ignore[attr-defined]
                if "UNAUTHENTICATED" in found:
                    break
    return found


class Watched:
    """An undisturbed sweep, and what was seen while it ran."""

    def __init__(self, case: Path, out: Path, python: Path, reachable: Path) -> None:
        self.recorded = out.parent / "results.jsonl"
        environment = {"PYTHONPATH": str(Path(__file__).parent), "RECORD_TO": str(self.recorded)}
        callback = ("--callback", "recording_callback:Recorder")
        self.home = reachable / "home"
        self.home.mkdir(mode=0o755)
        environment["HOME"] = str(self.home)
        flags = (*FLAGS, "--limit", "5", *HERE, *callback)
        self.run = SweepProcess(case, out, *flags, python=str(python), umask=0o002, **environment)
        self.addresses: set[str] = set()
        self.commands: set[str] = set()
        self.answers: dict[int, set[str]] = {}
        self.run.wait_until(self._look, "the end of loading")
        self.logs = dict(logs_of_sweeps())
        self.leaking = [path for path, data in self.logs.items() if SECRET.encode() in data]
        (private,) = {found[1] for command in self.commands if (found := PRIVATE.search(command))}
        self.private = Path(private)
        self.places = (self.private, self.home, out.parent)
        self.exposed = [path for place in self.places for path in writable_by_others(place)]
        self.reached = what_a_stranger_reaches(self.private, self.home / ".ray" / "auth_token", self.run.folder)
        self.text = self.run.wait()

    def _look(self) -> bool:
        below = self.run.descendants()
        for address, port in listening([*below, self.run.process.pid]):
            self.addresses.add(address)
            if port not in self.answers:
                self.answers[port] = answers_without_token(port)
        self.commands |= set(below.values())
        trials = Store(self.run.folder).trials()
        return any(facts["status"] == "finished" for facts in trials.values())


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_and_data(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def watched(case: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Installed in a folder with a space in its name, as people's folders are."""
    environment = tmp_path_factory.mktemp("a place") / "venv"
    environment.symlink_to(sys.prefix)
    with tempfile.TemporaryDirectory(prefix="everybody-", dir="/tmp") as reachable:  # unlike pytest's own directories
        Path(reachable).chmod(0o755)
        out = Path(reachable) / "sweep" / "results"
        out.parent.mkdir()
        yield Watched(case, out, environment / "bin" / "python", Path(reachable))


@pytest.fixture(scope="module")
def trials(watched: Watched) -> dict[str, dict[str, Any]]:
    return Store(watched.run.folder).trials()


def test_every_document_has_one_row_in_every_configuration(watched: Watched) -> None:
    found = stored_rows(watched.run.folder)
    expected = {(policy, f"gsm8k/{n}") for policy in ("k1", "k1_first", "k2_middle") for n in range(5)}
    assert {(row["policy"], row["doc_id"]) for row in found.values()} == expected
    assert len(found) == len(expected)


def test_each_actor_loads_the_model_once(trials: dict[str, dict[str, Any]]) -> None:
    """On a busy machine one actor may have run all trials before the other was ready."""
    attempts = [attempt for facts in trials.values() for attempt in facts["attempts"]]
    assert len(attempts) == len(trials) == 6
    actors = {attempt["actor"] for attempt in attempts}
    assert actors <= {"worker-1", "worker-2"}
    assert len({attempt["process"] for attempt in attempts}) == len(actors)
    assert len({(attempt["actor"], attempt["load_seconds"]) for attempt in attempts}) == len(actors)


def test_tune_knows_the_grid_and_hears_from_running_trials(watched: Watched) -> None:
    reports = [json.loads(line) for line in watched.recorded.read_text().splitlines()]
    configurations = {report["name"]: report["config"] for report in reports}
    assert len(configurations) == 6
    assert configurations["gsm8k/k2_middle/1"] == {
        "task": "gsm8k",
        "policy": "k2_middle",
        "threshold": 0.95,
        "small_block": 8,
        "block_cache": True,
        "reveal": "threshold",
        "repeat": 0,
        "shard": 1,
    }
    by_trial: dict[str, list[dict[str, Any]]] = {}
    for report in reports:
        by_trial.setdefault(report["name"], []).append(report)
    for name, own in by_trial.items():
        *running, last = own
        assert last["done"]
        assert last["documents"] == (3 if name.endswith("/0") else 2)
        assert [report["done"] for report in running] == [False] * len(running)
        assert running, "the second document of a trial is reported while it runs"
        assert all(0 <= report["accuracy"] <= 1 and report["tokens_per_s"] > 0 for report in own)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_module:Class", "cannot import no_such_module"),
        ("recording_callback:Missing", "Missing must be a subclass of ray.tune.Callback"),
        ("recording_callback:json", "json must be a subclass of ray.tune.Callback"),
        ("recording_callback:NeedsArguments", "NeedsArguments must be created without arguments"),
    ],
)
def test_a_callback_that_cannot_be_used_is_refused(name: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        load_callback(name)


def test_configurations_that_are_the_same_give_the_same_tokens(watched: Watched) -> None:
    tokens: dict[str, dict[str, list[int]]] = {}
    for row in stored_rows(watched.run.folder).values():
        tokens.setdefault(row["policy"], {})[row["doc_id"]] = row["token_ids"]
    assert tokens["k1"] == tokens["k1_first"] != tokens["k2_middle"]


def test_each_trial_says_how_it_was_made(trials: dict[str, dict[str, Any]]) -> None:
    for facts in trials.values():
        (attempt,) = facts["attempts"]
        assert facts["status"] == "finished"
        assert facts["rows"] == facts["tally"]["documents"] in (2, 3)
        assert attempt["calibration"] > 0
        assert 0 < attempt["decode_seconds"] < attempt["seconds"]
        assert facts["settings"]["dtype"] == "float32"
        assert facts["layers"] == {"k1": [], "k1_first": [1, 2], "k2_middle": [2, 3]}[facts["trial"]["policy"]]


def test_nothing_listens_beyond_this_machine(watched: Watched) -> None:
    assert len(watched.addresses) > 0
    assert [address for address in watched.addresses if not is_loopback(address)] == []


def test_every_port_needs_the_token(watched: Watched) -> None:
    """Ray's services answer health checks and metrics to everybody, and nothing else."""
    assert len(watched.answers) >= 4
    assert [answers for answers in watched.answers.values() if answers & {"OK", "200"}] == []
    assert sum("UNAUTHENTICATED" in answers for answers in watched.answers.values()) >= 4


def test_other_users_can_neither_read_the_token_nor_plant_anything(watched: Watched) -> None:
    token = watched.home / ".ray" / "auth_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert stat.S_IMODE(token.parent.stat().st_mode) == 0o700
    assert watched.exposed == []
    if watched.reached is None:
        pytest.skip("only root can become another user")
    assert watched.reached == ""


def test_no_secret_is_printed(watched: Watched) -> None:
    assert watched.logs
    assert watched.leaking == []
    assert any("ray::" in command for command in watched.commands)
    assert not any(SECRET in command for command in watched.commands)
    assert SECRET not in watched.text
    for path in watched.run.folder.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


def test_workers_and_the_result_actor_have_readable_names(watched: Watched) -> None:
    names = {found for command in watched.commands for found in re.findall(r"ray::(\w+)", command)}
    assert {"Results", "SweepWorker"} <= {name.partition(".")[0] for name in names}


def test_it_ends_with_a_table_and_the_folder(watched: Watched) -> None:
    lines = watched.text.splitlines()
    assert lines[-1] == str(watched.run.folder)
    for policy in ("k1", "k1_first", "k2_middle"):
        assert any(re.search(rf"\b{policy}\b.* 5/5 ", line) for line in lines), watched.text
    assert any(line.startswith("gsm8k is ") for line in lines)
    assert max(map(len, lines)) <= max(80, len(str(watched.run.folder)))


def test_the_same_command_again_and_then_more(case: Path, watched: Watched) -> None:
    """ "Nothing to do" is printed without starting Ray; a larger limit and a policy add rows and touch none."""
    out = watched.run.folder.parent
    before = {path: path.read_bytes() for path in watched.run.folder.rglob("rows.parquet")}
    again = SweepProcess(case, out, *FLAGS, "--limit", "5", *HERE)
    text = again.wait()
    assert "nothing to do" in text
    assert text.splitlines()[-1] == str(watched.run.folder)
    first = stored_rows(watched.run.folder)
    more = SweepProcess(
        case, out, *FLAGS, "--policies", "k1,k3_last", "--limit", "7", "--actors", "1", "--no-dashboard"
    )
    more.wait()
    grown = stored_rows(watched.run.folder)
    assert {key: grown[key] for key in first} == first
    added = {(row["policy"], row["doc_id"]) for key, row in grown.items() if key not in first}
    assert added == {("k1", "gsm8k/5"), ("k1", "gsm8k/6"), *(("k3_last", f"gsm8k/{n}") for n in range(7))}
    for path, data in before.items():
        facts = json.loads((path.parent / "trial.json").read_text())["trial"]
        assert facts["policy"] == "k1" or path.read_bytes() == data
