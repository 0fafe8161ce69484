"""`ray up` with cluster.yaml, a sweep by `ray submit`, its folder fetched, `ray down`. `make test-cluster`.

cluster.yaml is changed as its comments say for machines reached by SSH. The laptop, the head and the worker are nodes
of `node_namespaces` that share the Python environment, the model and the documents, so that nothing has to be installed
or downloaded. The project itself travels from the laptop to the others by rsync.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_variants import MACHINES, variant_config
from node_namespaces import ROOT, Node, machines, reason_against_services
from ray_nodes import RAY, attempts, hosts_at_work, model_loads
from small_sweep import write_model_and_data
from sweep_process import SweepProcess, grid_flags, stored_rows

REASON = reason_against_services(("sshd", "rsync", "ssh-keygen", "tmux"))
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(REASON is not None, reason=REASON or "")]
FLAGS = grid_flags(max_new_tokens=40, shard_size=3)
SSHD = """
ListenAddress {address}:22
HostKey /run/sshd/host_key
AuthorizedKeysFile /run/sshd/authorized_keys
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
"""
# `ray down` stops Ray on the head only; on manually managed machines the worker exits by itself after this time.
LEAVE_SOON = "RAY_gcs_rpc_server_reconnect_timeout_s=10"
WAIT_FOR_NODES = """
import time
import ray
ray.init(address="auto", log_to_driver=False)
while len(ray.nodes()) < 2:
    time.sleep(1)
"""


@pytest.fixture
def case(tmp_path: Path) -> Path:
    return write_model_and_data(tmp_path / "case")


@pytest.fixture
def nodes(tmp_path: Path, case: Path) -> Iterator[tuple[Node, Node, Node]]:
    """Laptop, head and worker; SSH leads from the laptop to the others."""
    with machines(tmp_path / "nodes", read_only=[case]) as made:
        laptop = made.add("laptop")
        head, worker = (made.add(name, project=False) for name in ("head", "worker"))
        make_key(laptop, f"{laptop.home}/.ssh/id_ed25519")
        for node in (head, worker):
            make_key(node, "/run/sshd/host_key")
            public = laptop.path("~/.ssh/id_ed25519.pub").read_bytes()
            node.path("/run/sshd/authorized_keys").write_bytes(public)
            node.path("/run/sshd/config").write_text(SSHD.format(address=node.address), encoding="ascii")
            output = tmp_path / f"sshd-{node.name}.out"
            node.start("/usr/sbin/sshd", "-D", "-e", "-f", "/run/sshd/config", output=output)
        yield laptop, head, worker


def make_key(node: Node, path: str) -> None:
    node.path(path).parent.mkdir(parents=True, exist_ok=True)
    done = node.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path)
    assert done.returncode == 0, done.stderr


def configuration(head: Node, worker: Node) -> dict[str, Any]:
    """cluster.yaml for these two machines: nothing is installed, and the worker offers one core."""
    config = variant_config(MACHINES)
    config["provider"] |= {"head_ip": head.address, "worker_ips": [worker.address]}
    config["auth"] |= {"ssh_user": "root", "ssh_private_key": "~/.ssh/id_ed25519"}
    config["max_workers"] = 1
    del config["file_mounts"]["~/reuse-sweep/.git"]  # a checkout's may be large, or a file
    (token,) = (command for command in config["setup_commands"] if "auth_token" in command)
    (profile,) = (command for command in config["setup_commands"] if "RAY_AUTH_MODE" in command)
    config["setup_commands"] = [
        token,
        "[ -s ~/.bashrc ] || echo >> ~/.bashrc",
        profile.replace("$HOME/venv/bin", f"{Path(sys.executable).parent}"),
        "echo 'export PYTHONPATH=$HOME/reuse-sweep OMP_NUM_THREADS=1' >> ~/.bashrc",
    ]
    for kind, cpus in (("head", 0), ("worker", 1)):
        start = f"{LEAVE_SOON} ray start --num-cpus={cpus} --object-store-memory=100000000"
        commands = config[f"{kind}_start_ray_commands"]
        config[f"{kind}_start_ray_commands"] = [command.replace("ray start", start) for command in commands]
    return config


def ray_processes(*nodes: Node) -> list[str]:
    lines = [line for node in nodes for line in node.processes().values()]
    return [line for line in lines if "raylet" in line or "gcs_server" in line]


def test_up_sweep_fetch_down(nodes: tuple[Node, Node, Node], case: Path, tmp_path: Path) -> None:
    laptop, head, worker = nodes
    plain = SweepProcess(case, tmp_path / "undisturbed", *FLAGS, "--actors", "2", "--no-dashboard")
    plain.wait()
    laptop.path("~/cluster.yaml").write_text(yaml.safe_dump(configuration(head, worker)), encoding="utf-8")
    laptop.path("~/wait.py").write_text(WAIT_FOR_NODES, encoding="ascii")
    file = f"{laptop.home}/cluster.yaml"

    def ray(*arguments: str, code: int | None = 0) -> str:
        done = laptop.run(*RAY, *arguments, RAY_UP_enable_autoscaler_v2="0")
        assert code in (None, done.returncode), done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    ray("get-auth-token", "--generate")
    ray("up", "-y", "--no-config-cache", file)
    ray("submit", "--no-config-cache", file, f"{laptop.home}/wait.py")
    assert all(node.path("~/reuse-sweep/orchestrator/sweep.py").exists() for node in (head, worker))
    assert not any(node.path(ROOT / "orchestrator").exists() for node in (head, worker))
    where = ["--model", str(case / "model"), "--data", str(case / "data"), "--out", "~/results", "--name", "s"]
    submit = ["submit", "--tmux", "--no-config-cache", file, "orchestrator/sweep.py", "--"]
    ray(*submit, "--address", "auto", *where, *FLAGS)
    until = time.monotonic() + 900
    while "complete" not in (status := ray("exec", file, "python -m orchestrator.status ~/results/s", code=None)):
        assert time.monotonic() < until, status
        time.sleep(1)
    ray("rsync-down", file, "~/results/", f"{laptop.home}/fetched")
    fetched = laptop.path("~/fetched/s")
    assert stored_rows(fetched) == stored_rows(plain.folder)
    assert hosts_at_work(fetched) == {"worker"}
    assert {attempt["actor"] for attempt in attempts(fetched)} == {"worker-1"}
    assert model_loads(fetched) == 1
    assert ray_processes(head)
    assert ray_processes(worker)
    ray("down", "-y", file)
    assert not ray_processes(head)
    until = time.monotonic() + 900
    while ray_processes(worker):
        assert time.monotonic() < until, "Ray still runs on the worker"
        time.sleep(0.5)
