"""`ray up` with cluster.yaml, a sweep by `ray submit`, its folder fetched, `ray down`. `make test-cluster`.

The file is changed as its comments say for machines reached by SSH; a private sshd in a cage stands for two of them.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cage import ADDRESSES, Cage, reason_against
from cluster_variants import MACHINES, elsewhere
from sweep_cases import write_case
from sweep_runs import Run, outcome

REASON = reason_against(("sshd", "rsync", "ssh-keygen", "tmux"))
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(REASON is not None, reason=REASON or "")]
FLAGS = ("--tasks", "gsm8k", "--policies", "k1,k2_middle,k3_last", "--max-new-tokens", "40", "--shard-size", "3")
SSHD = """
ListenAddress {head}:22
ListenAddress {worker}:22
HostKey {folder}/host
AuthorizedKeysFile {folder}/key.pub
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
"""


@pytest.fixture
def cage(tmp_path: Path) -> Iterator[Cage]:
    """With an sshd on two addresses."""
    made = Cage(tmp_path / "cage")
    for name in ("host", "key"):
        made_key = made.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name))
        assert made_key.returncode == 0, made_key.stderr
    head, worker = ADDRESSES
    (tmp_path / "sshd_config").write_text(SSHD.format(head=head, worker=worker, folder=tmp_path), encoding="ascii")
    made.start("/usr/sbin/sshd", "-D", "-e", "-f", str(tmp_path / "sshd_config"), output=tmp_path / "sshd.out")
    try:
        yield made
    finally:
        made.close()


def local_configuration(key: Path) -> dict[str, Any]:
    """cluster.yaml for two addresses of this machine: nothing is installed, and each has a core."""
    config = elsewhere(MACHINES)
    head, worker = ADDRESSES
    config["provider"] |= {"head_ip": head, "worker_ips": [worker]}
    config["auth"] |= {"ssh_user": "root", "ssh_private_key": str(key)}
    config["max_workers"] = 1
    del config["file_mounts"]["~/reuse-sweep/.git"]  # a checkout's may be large, or a file
    (token,) = (command for command in config["setup_commands"] if "auth_token" in command)
    (profile,) = (command for command in config["setup_commands"] if "RAY_AUTH_MODE" in command)
    config["setup_commands"] = [
        token,
        "touch ~/.bashrc; [ -s ~/.bashrc ] || echo >> ~/.bashrc",
        profile.replace("$HOME/venv/bin", f"{Path(sys.executable).parent}"),
        "echo 'export PYTHONPATH=$HOME/reuse-sweep OMP_NUM_THREADS=1' >> ~/.bashrc",
    ]
    size = "--num-cpus=1 --object-store-memory=100000000"
    for kind, address in (("head", head), ("worker", worker)):
        config[f"{kind}_start_ray_commands"] = [
            command.replace("ray start", f"ray start --node-ip-address={address} {size}")
            for command in config[f"{kind}_start_ray_commands"]
        ]
    config["worker_start_ray_commands"].remove("ray stop")  # on the same machine: it would stop the head
    return config


def test_up_sweep_fetch_down(cage: Cage, tmp_path: Path) -> None:
    case = write_case(tmp_path / "case")
    plain = Run(case, tmp_path / "undisturbed", *FLAGS, "--actors", "2", "--no-dashboard")
    plain.wait()
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(local_configuration(tmp_path / "key")), encoding="utf-8")

    def ray(*arguments: str, code: int | None = 0) -> str:
        done = cage.run(str(Path(sys.executable).parent / "ray"), *arguments, RAY_UP_enable_autoscaler_v2="0")
        assert code in (None, done.returncode), done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    def status() -> str:
        return ray("exec", str(path), "python -m orchestrator.status ~/results/s", code=None)

    ray("get-auth-token", "--generate")
    ray("up", "-y", "--no-config-cache", str(path))
    wait = "import ray, time; ray.init(address='auto', log_to_driver=False)\nwhile len(ray.nodes()) < 2: time.sleep(1)"
    (tmp_path / "wait.py").write_text(wait, encoding="ascii")
    ray("submit", "--no-config-cache", str(path), str(tmp_path / "wait.py"))
    where = ["--model", str(case / "model"), "--data", str(case / "data"), "--out", "~/results", "--name", "s"]
    submit = ["submit", "--tmux", "--no-config-cache", str(path), "orchestrator/sweep.py", "--"]
    ray(*submit, "--address", "auto", *where, *FLAGS)
    until = time.monotonic() + 900
    while "complete" not in (told := status()):
        assert time.monotonic() < until, told
        time.sleep(1)
    ray("rsync-down", str(path), "~/results/", str(tmp_path / "fetched"))
    assert outcome(tmp_path / "fetched" / "s") == outcome(plain.folder)
    assert any("raylet" in args for args in cage.processes().values())
    ray("down", "-y", str(path))
    assert not [args for args in cage.processes().values() if "raylet" in args or "gcs_server" in args]
