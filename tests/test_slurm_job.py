"""Rendered job scripts, executed by bash: containers, Ray's token and the dashboard's address.

In the fast tests a small program stands for Python; the slow one runs a real sweep on two Ray nodes of this machine.
"""

import json
import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.slurm import parse_submission
from orchestrator.slurm.submit import submit

ROOT = Path(__file__).parents[1]
TOKEN = "a-token-that-nobody-may-see"
# Records each call with its environment, and does what the real modules do as far as the script can see it.
PYTHON = """#!{python}
import json, os, sys, time
words = sys.argv[1:]
if words[:2] == ["-m", "ray.scripts.scripts"]:
    words[1] = "ray"
keep = ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE", "HF_HOME", "TMPDIR", "IN_CONTAINER", "PYTHONNOUSERSITE")
call = dict(argv=words[1:], env={{name: os.environ.get(name) for name in keep}})
with open("{calls}", "a") as file:
    file.write(json.dumps(call) + "\\n")
if words[1:3] == ["orchestrator.slurm", "free-ports"]:
    print(10001, 10002)
elif words[1:3] == ["orchestrator.slurm", "wait-until-ready"]:
    while open("{calls}").read().count('"argv": ["ray"') < int(words[4]):
        time.sleep(0.05)  # like the real one, until all nodes have started Ray
elif words[1] == "ray":
    if "--head" in words:
        folder = next(word.partition("=")[2] for word in words if word.startswith("--temp-dir="))
        os.mkdir(folder)
        with open(os.path.join(folder, "ray_current_cluster"), "w") as file:
            file.write("127.0.0.1:6379")
    while True:
        time.sleep(60)  # until TERM
elif words[1] == "orchestrator.sweep":
    open(os.path.join("{folder}", "swept"), "w").close()
"""
# Like Apptainer, runs what follows the image; binds, switches and the image are recorded.
APPTAINER = """#!/bin/bash
printf '%s\\n' "$*" >> {calls}
[ "$1" = exec ] || exit 3
shift
while [ "${{1:0:1}}" = - ]; do
    if [ "$1" = --bind ]; then [ -e "$2" ] || {{ echo "no such mount source: $2" >&2; exit 255; }}; shift; fi
    shift
done
image=$1; shift
export IN_CONTAINER=$image
exec "$@"
"""
# Runs the command of a step on this machine. USR1 reaches the step, as with the real one.
SRUN = """#!/bin/bash
while [ "${{1:0:1}}" = - ]; do shift; done
SLURM_LAUNCH_NODE_IPADDR=127.0.0.1 exec env {variables} "$@"
"""


class Site:
    """A directory with programs that are first on the path, a home directory and a place to submit from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin, self.home, self.here = (folder / name for name in ("bin", "home", "here"))
        for path in (self.bin, self.home, self.here):
            path.mkdir()
        self.calls, self.container_calls = folder / "calls", folder / "container-calls"
        self.install("python", PYTHON.format(python=sys.executable, calls=self.calls, folder=folder))
        self.install("sleep", "#!/bin/sh\nexec /bin/sleep 0.1\n")  # the script waits for the real Ray
        (folder / "setup.sh").write_text(f"PYTHON={self.bin}/python\n", encoding="utf-8")

    def install(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(text, encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def install_apptainer(self) -> None:
        self.install("apptainer", APPTAINER.format(calls=self.container_calls))

    def run(self, script: str, *, nodes: int = 1, **variables: str) -> subprocess.CompletedProcess[str]:
        path = self.folder / "job.sh"
        path.write_text(script, encoding="utf-8")
        kept = ("PATH", "LANG", "TZ")
        environment = {
            **{name: os.environ[name] for name in kept if name in os.environ},
            "HOME": str(self.home),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_CPUS_PER_TASK": "1",
            "SLURM_CPUS_ON_NODE": "1",
            **variables,
        }
        environment["PATH"] = f"{self.bin}:{environment['PATH']}"
        return subprocess.run(
            ["bash", str(path)], cwd=self.here, env=environment, capture_output=True, text=True, check=False
        )

    def python_calls(self) -> list[dict[str, Any]]:
        lines = self.calls.read_text(encoding="utf-8").splitlines() if self.calls.exists() else []
        return [json.loads(line) for line in lines]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path)
    monkeypatch.chdir(made.here)
    return made


def script(site: Site, *flags: str, sweep: tuple[str, ...] = ()) -> str:
    """The script that `submit` writes, with the directory that it creates for the log."""
    chosen = ("--tasks", "gsm8k", "--model", "tiny", "--name", "s", *sweep)
    setup = ("--setup", str(site.folder / "setup.sh"))
    submission = parse_submission(("--nodes", "1", "--time", "30", *setup, *flags, "--dry-run", "--", *chosen))
    (submission.folder / "slurm").mkdir(parents=True, exist_ok=True)
    return submit(submission)


PROGRAMS = ["orchestrator.slurm free-ports", "orchestrator.slurm wait-until-ready", "orchestrator.sweep", "ray"]


def modules(site: Site) -> list[str]:
    """The module of each call, with the command for orchestrator.slurm."""
    calls = [call["argv"] for call in site.python_calls()]
    return [" ".join(words[:2]) if words[0] == "orchestrator.slurm" else words[0] for words in calls]


def test_without_a_container_python_runs_directly(site: Site) -> None:
    done = site.run(script(site, sweep=("--no-dashboard",)), RAY_AUTH_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    assert sorted(modules(site)) == PROGRAMS
    assert all(call["env"]["IN_CONTAINER"] is None for call in site.python_calls())
    assert "dashboard" not in done.stdout
    assert (site.folder / "swept").exists()


def test_every_python_process_runs_in_the_container(site: Site) -> None:
    site.install_apptainer()
    site.install("srun", SRUN.format(variables="SLURMD_NODENAME=n2"))
    image = site.folder / "an image.sif"
    image.touch()
    text = script(site, "--container", str(image), "--gpus-per-node", "a100:2")
    done = site.run(text, nodes=2, RAY_AUTH_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    expected = [
        "orchestrator.slurm free-ports",
        "orchestrator.slurm wait-until-ready",
        "orchestrator.sweep",
        "ray",
        "ray",
    ]
    assert sorted(modules(site)) == expected, "the head and the worker both start Ray"
    cache = site.home / ".cache" / "huggingface"
    for call in site.python_calls():
        environment = call["env"]
        assert environment["IN_CONTAINER"] == str(image)
        assert (environment["RAY_AUTH_TOKEN"], environment["RAY_AUTH_MODE"]) == (TOKEN, "token")
        assert (environment["HF_HOME"], environment["PYTHONNOUSERSITE"]) == (str(cache), "1")
    calls = site.container_calls.read_text(encoding="utf-8").splitlines()
    assert len(calls) == len(expected)
    for call_line in calls:
        options = call_line.partition(str(image))[0]
        assert options.startswith("exec --nv ")
        bound = re.findall(r"--bind (\S+)", options)
        assert {str(site.here), str(cache)} <= set(bound)
        assert any(re.fullmatch(r"/\S*/rs-\w{6}", path) for path in bound), "TMPDIR"
    assert cache.is_dir()


def test_a_container_without_gpus_gets_no_nvidia_libraries(site: Site) -> None:
    site.install_apptainer()
    done = site.run(script(site, "--container", "docker://x/y"), RAY_AUTH_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    assert "--nv" not in site.container_calls.read_text(encoding="utf-8")


def test_a_node_without_apptainer_is_reported(site: Site) -> None:
    if any((Path(folder) / "apptainer").exists() for folder in os.environ["PATH"].split(":")):
        pytest.skip("Apptainer is installed here")
    done = site.run(script(site, "--container", "docker://x/y"), RAY_AUTH_TOKEN=TOKEN)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert f"error: --container needs Apptainer, and {socket.gethostname()} has no apptainer" in done.stderr
    assert site.python_calls() == []


def test_the_dashboard_line_has_host_port_and_the_place_of_the_token(site: Site) -> None:
    source = "/home/me/.ray/auth_token on login1"
    done = site.run(script(site), RAY_AUTH_TOKEN=TOKEN, REUSE_SWEEP_TOKEN_SOURCE=source)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("dashboard"))
    assert f"ssh -L 10002:127.0.0.1:10002 {socket.gethostname()} " in line
    assert line.endswith(f"http://127.0.0.1:10002; its token is in {source}")
    (head,) = (call["argv"] for call in site.python_calls() if "--head" in call["argv"])
    assert "--dashboard-port=10002" in head
    assert "--include-dashboard=true" in head
    everything = [done.stdout, done.stderr, *(path.read_text() for path in site.here.rglob("*") if path.is_file())]
    assert not [text for text in everything if TOKEN in text]
    assert not [call for call in site.python_calls() if TOKEN in str(call["argv"])]


def test_a_job_submitted_by_hand_finds_or_makes_a_token(site: Site) -> None:
    """`sbatch script.sh` does not pass a token; the node's home directory may have the file, or not."""
    text = script(site)
    done = site.run(text)
    assert done.returncode == 0, done.stderr
    assert "its token was made for this job and is not stored" in done.stdout
    made = {call["env"]["RAY_AUTH_TOKEN"] for call in site.python_calls() if call["argv"][0] == "ray"}
    (value,) = made
    assert len(bytes.fromhex(value)) == 32
    assert value not in done.stdout
    site.calls.unlink()
    path = site.home / ".ray" / "auth_token"
    path.parent.mkdir()
    path.write_text(TOKEN, encoding="ascii")
    done = site.run(text)
    assert f"its token is in {path} on {socket.gethostname()}" in done.stdout
    assert {call["env"]["RAY_AUTH_TOKEN"] for call in site.python_calls()} == {TOKEN}


def test_an_old_token_path_of_the_submitting_host_does_not_stop_the_job(site: Site) -> None:
    """Ray aborts if RAY_AUTH_TOKEN_PATH names a file that does not exist, as on a node with another home directory."""
    done = site.run(script(site), RAY_AUTH_TOKEN=TOKEN, RAY_AUTH_TOKEN_PATH="/no/such/file")
    assert done.returncode == 0, done.stderr
    assert {call["env"]["RAY_AUTH_TOKEN"] for call in site.python_calls()} == {TOKEN}


@pytest.mark.slow
def test_a_real_sweep_runs_in_containers_on_two_nodes(site: Site) -> None:
    """With the real Python and Ray; Apptainer is the program above, and both nodes are this machine."""
    site.install_apptainer()
    site.install("srun", SRUN.format(variables="SLURM_CPUS_ON_NODE=1"))
    (site.bin / "sleep").unlink()
    (site.folder / "setup.sh").write_text(f"PYTHON={sys.executable}\nexport PYTHONPATH={ROOT}\n", encoding="utf-8")
    sweep = (
        "--policies",
        "k1,k2_middle",
        "--no-replicate",
        "--limit",
        "2",
        "--max-new-tokens",
        "32",
        "--shard-size",
        "1",
        "--no-dashboard",
    )
    text = script(site, "--nodes", "2", "--container", "docker://x/y", sweep=sweep)
    done = site.run(text, nodes=2, RAY_AUTH_TOKEN=TOKEN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ray on 2 of 2 nodes" in done.stdout
    found = subprocess.run(
        [sys.executable, "-m", "orchestrator.status", str(site.here / "results" / "s")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "complete" in found
    calls = site.container_calls.read_text(encoding="utf-8").splitlines()
    assert sum(" ray.scripts.scripts start " in call for call in calls) >= 2
    assert TOKEN not in "".join(calls)
