"""A Slurm of two nodes in a cage: munge, one controller and two node daemons, each with one core. Knows no sweeps."""

import secrets
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from cage import HOST, Cage

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue")
NODES = ("n1", "n2")
WAIT = 60.0
CONF = """
ClusterName=two
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=16817
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
EnforcePartLimits=ALL
KillWait=20
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


class TwoNodes:
    """Started at birth; the cage ends it."""

    def __init__(self, cage: Cage, folder: Path) -> None:
        self.cage, self.folder = cage, folder
        folder.mkdir(mode=0o755)
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir()
        nodes = [
            f"NodeName={name} NodeHostname={HOST} NodeAddr=127.0.0.1 Port={16821 + place} CPUs=1 RealMemory=500"
            for place, name in enumerate(NODES)
        ]
        self.conf = folder / "slurm.conf"
        self.conf.write_text(
            CONF.format(host=HOST, folder=folder, nodes="\n".join(nodes), names=",".join(NODES)), encoding="ascii"
        )
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        socket = [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.sock", *socket)
        self._until(lambda: (folder / "munge.sock").exists(), "munge")
        self._daemon("slurmctld", "-D")
        for name in NODES:
            self._daemon("slurmd", "-D", "-N", name)
        self._until(lambda: self.run("sinfo", "-h", "-N", "-o", "%t").stdout.split() == ["idle"] * 2, "idle nodes")

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.cage.run(*command, SLURM_CONF=str(self.conf), **variables)

    def state(self, job: str) -> str:
        """As squeue calls it; empty once it has gone."""
        return self.run("squeue", "-h", "-j", job, "-o", "%T").stdout.strip()

    def details(self, job: str) -> dict[str, str]:
        told = self.run("scontrol", "show", "job", job).stdout.split()
        return dict(word.split("=", 1) for word in told if "=" in word)

    def until_ended(self, job: str, seconds: float = 900) -> str:
        """The state it ended in."""
        self._until(lambda: self.state(job) in ("", "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), "its end", seconds)
        return self.details(job)["JobState"]

    def _daemon(self, name: str, *arguments: str) -> None:
        path = f"/usr/sbin/{name}"
        output = self.folder / f"{name}{arguments[-1] if name == 'slurmd' else ''}.out"
        self.cage.start(path, *arguments, output=output, SLURM_CONF=str(self.conf))

    def _until(self, reached: Callable[[], bool], what: str, seconds: float = WAIT) -> None:
        until = time.monotonic() + seconds
        while not reached():
            logs = [f"{path}: {path.read_text(errors='replace')[-1500:]}" for path in self.folder.glob("*.out")]
            assert time.monotonic() < until, f"no {what} in {seconds:.0f} s; {logs}"
            time.sleep(0.5)
