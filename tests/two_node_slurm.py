"""A Slurm cluster of a login node, which also runs the controller, and two compute nodes with one core each.

All three are nodes of `node_namespaces`. They share one directory, as the nodes of real clusters do: it holds Slurm's
configuration and the results. Spool directories, /tmp, TMPDIR and, unlike on most clusters, home directories are
private.
"""

import secrets
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from node_namespaces import Machines, Node

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue")
NODES = ("n1", "n2")
LOGIN = "login"
WAIT_SECONDS = 600.0
MUNGE = "/run/munge"
SPOOL = "/var/spool/slurm"
CONFIGURATION = """
ClusterName=two
SlurmctldHost={login.name}({login.address})
AuthType=auth/munge
AuthInfo=socket={munge}/socket
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
StateSaveLocation={spool}
SlurmdSpoolDir={spool}
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
EnforcePartLimits=ALL
KillWait=20
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


class TwoNodeSlurm:
    """Runs from construction on, until its machines are closed."""

    def __init__(self, machines: Machines, shared: Path) -> None:
        self._folder = shared / "slurm"
        self._folder.mkdir()
        self.login = machines.add(LOGIN)
        self.nodes = [machines.add(name) for name in NODES]
        lines = [f"NodeName={node.name} NodeAddr={node.address} CPUs=1 RealMemory=500" for node in self.nodes]
        self._configuration = self._folder / "slurm.conf"
        self._configuration.write_text(
            CONFIGURATION.format(
                login=self.login, munge=MUNGE, spool=SPOOL, nodes="\n".join(lines), names=",".join(NODES)
            ),
            encoding="ascii",
        )
        key = self._folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        for node in (self.login, *self.nodes):
            self._start_munge(node, key)
        for node, daemon in ((self.login, "slurmctld"), *((node, "slurmd") for node in self.nodes)):
            node.path(SPOOL).mkdir(parents=True)
            self._start(node, daemon, "-D")
        self._until(lambda: self.run("sinfo", "-h", "-N", "-o", "%t").stdout.split() == ["idle"] * 2, "idle nodes")

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """On the login node."""
        return self.login.run(*command, SLURM_CONF=str(self._configuration), **variables)

    def state(self, job: str) -> str:
        """As squeue names it; empty after the job has left the queue."""
        return self.run("squeue", "-h", "-j", job, "-o", "%T").stdout.strip()

    def details(self, job: str) -> dict[str, str]:
        words = self.run("scontrol", "show", "job", job).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def until_ended(self, job: str, seconds: float = 900) -> str:
        """Waits for the job's end; its last state."""
        ended = ("", "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        self._until(lambda: self.state(job) in ended, f"end of job {job}", seconds)
        return self.details(job)["JobState"]

    def _start_munge(self, node: Node, key: Path) -> None:
        node.path(MUNGE).mkdir(mode=0o755)
        files = [f"--{name}-file={MUNGE}/{name}" for name in ("pid", "log", "seed")]
        self._start(node, "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={MUNGE}/socket", *files)
        self._until(lambda: node.path(f"{MUNGE}/socket").exists(), f"munge on {node.name}")

    def _start(self, node: Node, daemon: str, *arguments: str) -> None:
        output = self._folder / f"{daemon}-{node.name}.out"
        node.start(f"/usr/sbin/{daemon}", *arguments, output=output, SLURM_CONF=str(self._configuration))

    def _until(self, reached: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS) -> None:
        until = time.monotonic() + seconds
        while not reached():
            logs = [f"{path}: {path.read_text(errors='replace')[-1500:]}" for path in self._folder.glob("*.out")]
            assert time.monotonic() < until, f"no {what} after {seconds:.0f} s; {logs}"
            time.sleep(0.5)
