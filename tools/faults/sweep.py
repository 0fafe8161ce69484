"""A sweep of the campaign: its very small model and documents, its commands, its processes and its folder."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random

import torch

from orchestrator.store import Store
from tools.faults.disk import SmallDisk
from tools.faults.nodes import RAY_VARIABLES, TwoNodes
from tools.faults.row_checker import Problem, RowChecker, other_problem
from tools.processes import descendants, wait_until_gone
from tools.tiny.model_files import build_tokenizer, tiny_config, write_model
from tools.tiny.network import HEAD, new_weights

LAYERS = 6  # two each in first, middle and last
POLICIES = ("k1", "k2_first", "k2_middle", "k3_last")
DOCUMENTS = 48  # enough to decode while the faults of a round are injected
MAX_NEW_TOKENS = 96
SHARD_SIZE = 4
NAME = "s"  # of each sweep's folder

WORKER_PROCESS, RESULT_PROCESS = "ray::SweepWorker", "ray::Results"
# Ray's own agents: they hold no resources of a sweep, and try to reach a dead server for a minute before they end.
RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
ORPHANS_TIMEOUT_SECONDS = 60.0  # for the child processes of a killed command to end
COMMAND_TIMEOUT_SECONDS = 600.0
MAX_COMMANDS = 8  # after the faults, until the sweep must have finished
LOADING_SECONDS = 12.0  # in which a fault may hit a command that has no rows yet
MAX_ROWS_BETWEEN_FAULTS = 4
TRIALS_ANNOUNCED = " to run on "  # printed once a command has checked the folder
SWITCHES = ("--no-dashboard", "--no-replicate")
POLL_SECONDS = 0.2  # reading the folder takes time from the sweeps


class TooLate(Exception):
    """The sweep finished before the fault could be injected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepCase:
    """What every sweep of a campaign has in common."""

    folder: Path
    worker_timeout_seconds: float  # until a worker that hangs is killed
    documents: int = DOCUMENTS

    def flags(self, out: Path, *, address: str | None = None) -> list[str]:
        """The sweep's flags. Without an address, both actors fit on a single core; on two nodes each has its own."""
        values: dict[str, object] = {
            "tasks": "gsm8k",
            "policies": ",".join(POLICIES),
            "max-new-tokens": MAX_NEW_TOKENS,
            "shard-size": SHARD_SIZE,
            "limit": self.documents,
            "fewshot": 0,
            "model": self.folder / "model",
            "data": self.folder / "data",
            "out": out,
            "name": NAME,
            "actors": 2,
            "threads-per-actor": 1,
            "cpus-per-actor": 0.5 if address is None else 1,
            "worker-timeout": self.worker_timeout_seconds,
        }
        if address is not None:
            values["address"] = address
        return [*(str(part) for name, value in values.items() for part in (f"--{name}", value)), *SWITCHES]


def write_case(folder: Path, *, worker_timeout_seconds: float) -> SweepCase:
    write_model_and_data(folder, documents=DOCUMENTS)
    return SweepCase(folder=folder, worker_timeout_seconds=worker_timeout_seconds)


def write_model_and_data(folder: Path, *, documents: int) -> None:
    """Writes `folder`/data and `folder`/model, a random model whose answers differ by document and policy."""
    questions = [f"What is {number} plus {7 * number}, and why?" for number in range(documents)]
    tokenizer = build_tokenizer(questions[:DOCUMENTS], vocabulary=300, min_frequency=2)
    config = tiny_config(tokenizer, layers=LAYERS)
    weights = new_weights(config, torch.Generator().manual_seed(0))
    weights[HEAD] *= 50  # so confident that errors in the cache change the answer
    write_model(folder / "model", weights, config, tokenizer)
    data = folder / "data" / "openai" / "gsm8k"
    (data / "main").mkdir(parents=True)
    rows = [{"question": text, "answer": f"It is so.\n#### {8 * n}"} for n, text in enumerate(questions)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for split in ("train", "test"):
        (data / "main" / f"{split}.jsonl").write_text(text, encoding="utf-8")
    files = "".join(f"\n  - split: {split}\n    path: main/{split}.jsonl" for split in ("train", "test"))
    readme = f"---\nconfigs:\n- config_name: main\n  data_files:{files}\n---\n"
    (data / "README.md").write_text(readme, encoding="utf-8")


VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "REUSE_SWEEP_COMPACT_ROWS": "20"}


class SweepCommand:
    """One run of `python -m orchestrator.sweep` in its own session; starts when created."""

    def __init__(self, arguments: Sequence[str], output: Path) -> None:
        self.began = time.monotonic()
        self._output = output
        with output.open("w", encoding="utf-8") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "orchestrator.sweep", *arguments],
                env={**os.environ, **RAY_VARIABLES, **VARIABLES},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    @property
    def text(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace")

    def wait(self, timeout_seconds: float) -> int | None:
        """The exit code, or None after the timeout."""
        try:
            return self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> bool:
        """Kills the command with SIGKILL. Returns whether its child processes, except Ray's agents, ended too."""
        orphans = [pid for pid, name in descendants(self.pid).items() if not name.startswith(RAY_AGENTS)]
        self._process.kill()
        self._process.wait()
        if wait_until_gone(orphans, timeout_seconds=ORPHANS_TIMEOUT_SECONDS):
            return True
        for pid in orphans:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return False


def traceback_problems(command: SweepCommand) -> list[Problem]:
    """No command may print a traceback, no matter which fault hit it."""
    text = command.text
    if "Traceback" not in text and '  File "' not in text:
        return []
    last, _, _ = text.strip().splitlines()[-1].partition("; continue with")
    return [other_problem(f"a traceback before: {last}")]


@dataclass(kw_only=True)
class DisturbedSweep:
    """A sweep into which faults are injected. `start` begins or continues it; one command runs at a time."""

    case: SweepCase
    out: Path
    outputs: Path  # folder for the output of the commands
    disk: SmallDisk
    checker: RowChecker
    nodes: TwoNodes | None  # None: each command starts its own Ray
    commands: list[SweepCommand] = field(default_factory=list)
    output_numbers: Iterator[int] = field(default_factory=lambda: count(1))
    corrupted: list[tuple[Path, int]] = field(default_factory=list)  # file, number of commands before

    @property
    def folder(self) -> Path:
        return self.out / NAME

    @property
    def command(self) -> SweepCommand:
        return self.commands[-1]

    @property
    def running(self) -> bool:
        return bool(self.commands) and self.command.exit_code is None

    @property
    def finished(self) -> bool:
        return bool(self.commands) and self.command.exit_code == 0

    def start(self) -> None:
        self.commands.append(self.new_command())

    def new_command(self) -> SweepCommand:
        """Starts the sweep's command, even if it is already running."""
        flags = self.case.flags(self.out, address=None if self.nodes is None else self.nodes.address)
        return SweepCommand(flags, self.outputs / f"{self.out.name}-{next(self.output_numbers)}.txt")

    def count_rows(self) -> int:
        return len(Store(self.folder).rows(columns=["doc_id"], verify=False))

    def wait_for_random_moment(self, rng: Random) -> None:
        """Waits until a few more rows are stored, or only a few seconds, so that the command may still be loading."""
        if rng.random() < 0.25:
            moment = self.command.began + rng.uniform(0, LOADING_SECONDS)
            self._wait_until(lambda: time.monotonic() >= moment)
        else:
            rows = self.count_rows() + rng.randint(1, MAX_ROWS_BETWEEN_FAULTS)
            self._wait_until(lambda: self.count_rows() >= rows)
        time.sleep(rng.uniform(0, 0.3))
        if not self.running:
            raise TooLate

    def processes(self, name: str) -> list[int]:
        root = self.command.pid if self.nodes is None else self.nodes.pid
        return sorted(pid for pid, title in descendants(root).items() if title.startswith(name))

    def random_process(self, name: str, rng: Random) -> int:
        """A process of the running sweep with this name, as soon as there is one."""
        while True:
            self._wait_until(lambda: bool(self.processes(name)))
            if pids := self.processes(name):  # empty if the process has just ended
                return rng.choice(pids)

    def _wait_until(self, reached: Callable[[], bool]) -> None:
        until = time.monotonic() + COMMAND_TIMEOUT_SECONDS
        while not reached():
            if not self.running or time.monotonic() > until:
                raise TooLate
            time.sleep(POLL_SECONDS)

    def kill_driver(self) -> list[Problem]:
        """Kills the command and waits until its processes are gone, so that the folder can be used again."""
        all_gone = self.command.kill()
        until = time.monotonic() + COMMAND_TIMEOUT_SECONDS / 5
        while self.nodes is not None and (self.processes(WORKER_PROCESS) or self.processes(RESULT_PROCESS)):
            if time.monotonic() > until:
                all_gone = False
                break
            time.sleep(0.1)
        return [] if all_gone else [other_problem("processes of a killed command did not end")]

    def close(self) -> None:
        """Kills the command if it is running."""
        if self.running:
            self.kill_driver()

    def expect_quarantine(self, path: Path) -> None:
        """Records a file that was corrupted; `finish` checks that a later command reports and quarantines it."""
        self.corrupted.append((path, len(self.commands)))

    def finish(self) -> list[Problem]:
        """Repeats the command until the sweep is complete, as a user would; then checks everything."""
        problems: list[Problem] = []
        for _ in range(MAX_COMMANDS):
            if not self.running:
                self.start()
            code = self.command.wait(COMMAND_TIMEOUT_SECONDS)
            if code is None:
                problems += [other_problem(f"a command had not ended after {COMMAND_TIMEOUT_SECONDS:.0f} s")]
                problems += self.kill_driver()
            problems += traceback_problems(self.command)
            if code == 0 and not Store(self.folder).check():
                break
        problems += self.checker.check_finished()
        return [*problems, *self._unreported_corruption()]

    def _unreported_corruption(self) -> list[Problem]:
        """Corrupted files that were not quarantined or not reported."""
        problems = []
        for path, before in self.corrupted:
            if not list((self.folder / "quarantine" / path.parent.name).glob(f"{path.name}*")):
                problems.append(other_problem(f"{path} was corrupted and not quarantined"))
            later = self.commands[before:]
            cut_short = bool(later) and later[0].exit_code != 0 and TRIALS_ANNOUNCED not in later[0].text
            if not cut_short and not any(str(path) in command.text for command in later):
                problems.append(other_problem(f"{path} was corrupted and not reported"))
        return problems
