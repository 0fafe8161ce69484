"""A part of this machine for itself: processes, mounts, network and host name of its own. All in it ends with it.

The machine's other processes are not seen from inside, so that `ray stop` stops what was started there and no more, and
its ports, its /tmp and /run and the home of root are its own. Files elsewhere are the machine's.
"""

import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

NAMESPACES = ("--mount", "--pid", "--net", "--uts")
ROOT = Path(__file__).parents[1]
HOST = "cage"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
WAIT = 60


def reason_against(programs: Sequence[str] = ()) -> str | None:
    """Why there can be no cage here, in a sentence; None if there can."""
    if not Path("/etc/debian_version").exists() or os.geteuid() != 0:
        return "the cluster tests install and start system services, so they run on Debian as root only"
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"
    missing = [name for name in programs if shutil.which(name, path=path) is None]
    if missing:
        return f"{', '.join(missing)} are not installed; `make test-cluster` installs them"
    tried = subprocess.run(["unshare", *NAMESPACES, "--fork", "true"], capture_output=True, text=True, check=False)
    return f"this machine grants no namespaces ({tried.stderr.strip()})" if tried.returncode else None


class Cage:
    """`folder` holds its home of root, its /tmp and whatever else the test puts there."""

    def __init__(self, folder: Path) -> None:
        self._started: list[subprocess.Popen[bytes]] = []
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        self.tmp = folder / "tmp"
        self.tmp.mkdir()
        self.tmp.chmod(0o1777)
        self._outer = subprocess.Popen(
            [
                *("unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc"),
                *(sys.executable, str(ROOT / "tests" / "cage_init.py"), str(folder), pwd.getpwuid(0).pw_dir),
                *(str(path) for path in (ROOT, sys.prefix, sys.base_prefix)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._outer.stdout is not None
        assert self._outer.stdout.readline() == "ready\n"
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text().split()
        self.pid = int(children[0])

    def command(self, *command: str) -> list[str]:
        return ["nsenter", f"--target={self.pid}", *NAMESPACES, f"--wd={ROOT}", "--", *command]

    def run(self, *command: str, seconds: float = 600, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*command),
            env=self.environment(**variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def start(self, *command: str, output: Path, **variables: str) -> None:
        with output.open("ab") as file:
            started = subprocess.Popen(
                self.command(*command),
                env=self.environment(**variables),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._started.append(started)

    def environment(self, **variables: str) -> dict[str, str]:
        mine = {"HOME": pwd.getpwuid(0).pw_dir, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "USER": "root"}
        return {**os.environ, **mine, **variables}

    def processes(self) -> dict[int, str]:
        """What runs inside, with full command lines, by the numbers they have outside."""
        inside = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(path / "ns" / "pid") == inside:
                    found[int(path.name)] = (
                        (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    )
            except OSError:  # it has ended
                continue
        return {pid: args for pid, args in found.items() if args}

    def close(self) -> None:
        """With its first process all others end, and so do those outside that wait for them."""
        assert self._outer.stdin is not None
        assert self._outer.stdout is not None
        self._outer.stdin.close()
        try:
            self._outer.wait(WAIT)
        except subprocess.TimeoutExpired:
            self._outer.kill()
            self._outer.wait()
        self._outer.stdout.close()
        for started in self._started:
            started.wait(WAIT)
