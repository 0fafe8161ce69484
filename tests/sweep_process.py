"""Runs real sweeps as processes that a test can inspect, signal and kill."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from orchestrator.store import Store
from tools.faults.row_checker import VARYING_COLUMNS
from tools.processes import descendants

ROOT = Path(__file__).parents[1]
SECONDS = 900  # usually 20
SECRET = "hf_a-secret-that-nobody-may-see"  # in the environment of every run


BUNDLED = ("--model", "tiny", "--data", "bundled")


def grid_flags(policies: str = "k1,k2_middle,k3_last", **settings: int) -> tuple[str, ...]:
    """Flags of a sweep of gsm8k that runs each of these policies once, and of settings such as `shard_size`."""
    numbers = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return ("--tasks", "gsm8k", "--policies", policies, "--no-replicate", *numbers)


class SweepProcess:
    """One `python -m orchestrator.sweep`, in a session of its own like that of a terminal."""

    def __init__(
        self,
        case: Path,
        out: Path,
        *flags: str,
        python: str = sys.executable,
        umask: int = -1,
        output: Path | None = None,
        **environment: str,
    ) -> None:
        self.folder = out / "s"
        self.output = output or Path(tempfile.mkdtemp(prefix="run-", dir=out.parent)) / "output"
        where = ["--model", str(case / "model"), "--data", str(case / "data"), "--out", str(out), "--name", "s"]
        self.arguments = [*where, *flags]
        with self.output.open("w") as stream:
            self.process = subprocess.Popen(
                [python, "-m", "orchestrator.sweep", *self.arguments],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_TOKEN": SECRET, **environment},
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=umask,
            )

    def wait(self, code: int | None = 0) -> str:
        """Waits for its end, checks the exit code, and returns what it printed."""
        try:
            found: int | None = self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            found = self.process.wait()
        text = self.output.read_text() if self.output.is_file() else ""
        assert code is None or found == code, text
        return text

    def wait_until(self, reached: Callable[[], Any], what: str) -> Any:
        until = time.monotonic() + SECONDS
        while not (found := reached()):
            assert self.process.poll() is None, f"it ended before {what}: {self.output.read_text()}"
            if time.monotonic() > until:
                self.process.kill()
            time.sleep(0.05)
        return found

    def wait_for_rows(self, count: int = 1) -> None:
        self.wait_until(lambda: count_rows(self.folder) >= count, f"{count} rows")

    def descendants(self) -> dict[int, str]:
        return descendants(self.process.pid)

    def process_id(self, name: str) -> int:
        """The id of one of its processes. Waits for it: while a process changes its title, it has no name."""
        return self.wait_until(lambda: next((pid for pid, at in self.descendants().items() if name in at), None), name)


def count_rows(folder: Path) -> int:
    return len(Store(folder).rows(columns=["doc_id"], verify=False))


def listening(pids: Sequence[int]) -> set[tuple[str, int]]:
    """Addresses, as the kernel writes them, and ports on which these processes listen."""
    inodes = set()
    for pid in pids:
        try:
            links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        inodes |= {found[1] for link in links if (found := re.fullmatch(r"socket:\[(\d+)\]", link))}
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    found = (fields[1].rpartition(":") for fields in lines if fields[3] == "0A" and fields[9] in inodes)
    return {(address, int(port, 16)) for address, _, port in found}


def is_loopback(address: str) -> bool:
    """127.x.x.x, also mapped to IPv6, or ::1; /proc lists each four bytes in reverse order."""
    plain = address.removeprefix("0000000000000000FFFF0000")
    return (len(plain) == 8 and plain.endswith("7F")) or address == "00000000000000000000000001000000"


def stored_rows(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Rows by trial and document, without columns that vary between runs; checks that each is stored once."""
    table: pa.Table = Store(folder).rows()
    rows = table.drop_columns(sorted(VARYING_COLUMNS)).to_pylist()
    found = {(row["trial_id"], row["doc_id"]): row for row in rows}
    assert len(found) == len(rows), "a document has two rows"
    return found
