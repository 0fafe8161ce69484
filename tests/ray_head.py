"""A Ray cluster of one node that `ray start --head` starts, with a home, ports and a temporary folder of its own."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

RAY = str(Path(sys.executable).parent / "ray")
SECONDS = 600
LOCAL = "127.0.0.1"
HEAD_ID = "f" * 51 + "00000"  # the id by which the provider of these nodes knows the head
NOTHING_TO_DO = (
    *("setup_commands", "head_setup_commands", "worker_setup_commands", "initialization_commands"),
    *("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files"),
)
ELASTIC = {
    "RAY_FAKE_CLUSTER": "1",
    "RAY_enable_autoscaler_v2": "1",
    "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
}

HAS_AUTOSCALER_REPORT = """
import sys
from ray._raylet import GcsClient
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply
reply = GetClusterStatusReply.FromString(GcsClient(address=sys.argv[1]).get_cluster_status(timeout_s=60))
sys.exit(not reply.autoscaling_state.autoscaler_state_version)
"""


def free_port() -> int:
    with socket.create_server((LOCAL, 0)) as server:
        return int(server.getsockname()[1])


def is_listening(port: int) -> bool:
    try:
        socket.create_connection((LOCAL, port), 1).close()
    except OSError:
        return False
    return True


class RayHead:
    """The cluster requires this user's token, unless RAY_AUTH_MODE says otherwise.

    `autoscaler` describes nodes that Ray starts as processes, by demand; the head then has no processors of its own.
    """

    def __init__(self, *, autoscaler: dict[str, Any] | None = None, **variables: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="head-", dir="/tmp"))  # short: Ray puts sockets into it
        home = self.folder / "home"
        home.mkdir()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.environment = {**inherited, "HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
        subprocess.run([RAY, "get-auth-token", "--generate"], env=self.environment, check=True, capture_output=True)
        port, dashboard = free_port(), free_port()
        self.address, self.dashboard = f"{LOCAL}:{port}", f"http://{LOCAL}:{dashboard}"
        self.log = self.folder / "head.log"
        ports = (
            f"--port={port}",
            f"--dashboard-port={dashboard}",
            f"--ray-client-server-port={free_port()}",
            "--dashboard-agent-listen-port=0",
        )
        size = (
            f"--num-cpus={0 if autoscaler else 2}",
            "--object-store-memory=200000000",
            "--dashboard-agent-listen-port=0",
        )
        elastic = () if autoscaler is None else self._elastic(autoscaler, port)
        environment = {**self.environment, **({} if autoscaler is None else ELASTIC), **variables}
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [RAY, "start", "--head", "--block", f"--temp-dir={self.folder / 'r'}", *ports, *size, *elastic],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._until(lambda: is_listening(port))
        if autoscaler is not None:
            self._until(lambda: self._autoscaler_reports(environment))

    def _elastic(self, types: dict[str, Any], port: int) -> tuple[str, ...]:
        """Describes the nodes in a file that lies elsewhere than `ray up` would leave it."""
        head = {"resources": {}, "node_config": {}, "max_workers": 0}
        config = {
            **{key: [] for key in NOTHING_TO_DO},
            "file_mounts": {},
            "file_mounts_sync_continuously": False,
            "auth": {},
            "cluster_name": "elastic",
            "max_workers": sum(kind["max_workers"] for kind in types.values()),
            "idle_timeout_minutes": 5,
            "provider": {
                "type": "external",
                "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
                "launch_multiple": True,
                "head_node_id": HEAD_ID,
                "gcs_address": f"{LOCAL}:{port}",
            },
            "head_node_type": "ray.head.default",
            "available_node_types": {"ray.head.default": head, **types},
        }
        path = self.folder / "autoscaler.yaml"
        path.write_text(json.dumps(config), encoding="utf-8")
        return (f"--autoscaling-config={path}", f"--node-ip-address={LOCAL}")

    def _autoscaler_reports(self, environment: dict[str, str]) -> bool:
        """A sweep that starts earlier would wait only REPORT_TIMEOUT_SECONDS for the first report."""
        command = [sys.executable, "-c", HAS_AUTOSCALER_REPORT, self.address]
        return (
            subprocess.run(command, env={**environment, "RAY_AUTH_MODE": "token"}, capture_output=True).returncode == 0
        )

    def _until(self, reached: Callable[[], bool]) -> None:
        until = time.monotonic() + SECONDS
        while not reached():
            assert self._process.poll() is None, self.log.read_text()
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.2)

    def close(self) -> None:
        """Its processes are one group; SIGTERM to `ray start --block` ends the others."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            shutil.rmtree(self.folder, ignore_errors=True)
