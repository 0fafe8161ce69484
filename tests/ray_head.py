"""A Ray cluster of one node that `ray start --head` starts, with a home, ports and a temporary folder of its own."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

RAY = str(Path(sys.executable).parent / "ray")
SECONDS = 300
LOCAL = "127.0.0.1"


def free_port() -> int:
    with socket.create_server((LOCAL, 0)) as server:
        return int(server.getsockname()[1])


class RayHead:
    """`token`: the home has one. Whether the cluster asks for it is RAY_AUTH_MODE's to say, else it does."""

    def __init__(self, *flags: str, token: bool = True, **variables: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="head-", dir="/tmp"))  # short: Ray puts sockets into it
        home = self.folder / "home"
        home.mkdir()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.environment = {**inherited, "HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
        if token:
            subprocess.run([RAY, "get-auth-token", "--generate"], env=self.environment, check=True, capture_output=True)
        port, dashboard = free_port(), free_port()
        self.address, self.dashboard = f"{LOCAL}:{port}", f"http://{LOCAL}:{dashboard}"
        self.log = self.folder / "head.log"
        ports = (f"--port={port}", f"--dashboard-port={dashboard}", f"--ray-client-server-port={free_port()}")
        size = ("--num-cpus=2", "--object-store-memory=200000000", "--dashboard-agent-listen-port=0")
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [RAY, "start", "--head", "--block", f"--temp-dir={self.folder / 'r'}", *ports, *size, *flags],
                env={**self.environment, **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._until_listening(port)

    def _until_listening(self, *ports: int) -> None:
        until = time.monotonic() + SECONDS
        for port in ports:
            while True:
                try:
                    socket.create_connection((LOCAL, port), 1).close()
                    break
                except OSError:
                    assert self._process.poll() is None, self.log.read_text()
                    assert time.monotonic() < until, self.log.read_text()
                    time.sleep(0.2)

    def close(self) -> None:
        """Its processes are one group; SIGTERM to `ray start --block` ends the others."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            shutil.rmtree(self.folder, ignore_errors=True)
