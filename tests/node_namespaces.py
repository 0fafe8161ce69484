"""A cluster of nodes on one machine, separated by Linux namespaces: for tests of sweeps on several nodes.

Each node has a file system, a host name, a network address and processes of its own. Nodes share the kernel, the clock
and the cores, and they see, read-only, the system (/usr, /etc and so on), the Python environment and the project. All
else is private: /tmp, /var/tmp, the home directory, TMPDIR, /run and /dev/shm. A test that wants a shared file system,
as Slurm clusters have one, names its directory.

Every process belongs to one parent process. It ends when this process does, also by kill -9, and the kernel then
removes all processes, mounts and network interfaces.
"""

import functools
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NETWORK = "10.77.0"
ROUTER = f"{NETWORK}.254"
CLOSE_SECONDS = 600
WAIT_FOR_END = (
    "import signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print('ready', flush=True); sys.stdin.read()"
)
USER_NAMESPACE = ("--user", "--map-root-user")
PARENT_NAMESPACES = ("--mount", "--net", "--pid")
NODE_NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def reason_against_nodes() -> str | None:
    """Why this machine cannot separate nodes, or None."""
    if sys.platform != "linux":
        return "namespaces need Linux"
    missing = missing_programs(("unshare", "nsenter", "mount", "pivot_root", "ip"))
    if missing:
        return f"{', '.join(missing)} not installed (Debian packages util-linux, mount and iproute2)"
    return _failure_of_namespaces()


def reason_against_services(programs: Sequence[str] = ()) -> str | None:
    """Why system services (sshd, slurmd) cannot run on nodes here, or None."""
    if not Path("/etc/debian_version").exists() or os.geteuid() != 0:
        return "needs Debian and root: it starts system services"
    missing = missing_programs(programs)
    if missing:
        return f"{', '.join(missing)} not installed; `make test-cluster` installs them"
    return reason_against_nodes()


def missing_programs(names: Sequence[str]) -> list[str]:
    return [name for name in names if shutil.which(name, path=SYSTEM_PATH) is None]


@functools.cache
def _failure_of_namespaces() -> str | None:
    script = (
        "mount -t proc proc /proc && ip link add bridge0 type bridge && ip link add veth0 type veth peer name veth1"
    )
    command = ["unshare", *_user_namespace(), *PARENT_NAMESPACES, "--uts", "--ipc", "--fork", "sh", "-c", script]
    done = subprocess.run(command, env={"PATH": SYSTEM_PATH}, capture_output=True, text=True, check=False)
    return f"this machine does not grant namespaces: {done.stderr.strip()}" if done.returncode else None


def _user_namespace() -> tuple[str, ...]:
    """Only where needed: services such as sshd want all users of the machine."""
    return () if os.geteuid() == 0 else USER_NAMESPACE


def python_environment() -> list[Path]:
    """Directories that hold the interpreter and installed packages."""
    named = [sys.prefix, sys.base_prefix, *(path for path in sys.path if path.endswith("site-packages"))]
    found: list[Path] = []
    for path in sorted({path for name in named for path in (Path(name).absolute(), Path(name).resolve())}):
        if path.is_dir() and not path.is_relative_to("/usr") and not any(path.is_relative_to(other) for other in found):
            found.append(path)
    return found


class Machines:
    """Nodes on one network.

    `folder` keeps what the nodes write, for a look after their end. All nodes see the directories in `shared`, and
    those in `read_only` without writing to them, under the same paths as this process.
    """

    def __init__(self, folder: Path, *, shared: Sequence[Path] = (), read_only: Sequence[Path] = ()) -> None:
        self._folder, self._shared, self._read_only = folder, shared, read_only
        self.nodes: dict[str, Node] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._hosts = folder / "hosts"
        self._hosts.write_text("127.0.0.1 localhost\n", encoding="ascii")
        command = ["unshare", *_user_namespace(), *PARENT_NAMESPACES, "--mount-proc", "--fork", "--kill-child"]
        self._process = start_and_wait([*command, sys.executable, "-c", WAIT_FOR_END], folder / "parent.log")
        self._pid = child_of(self._process.pid)
        try:
            self._ip("link", "add", "bridge0", "type", "bridge")
            self._ip("address", "add", f"{ROUTER}/24", "dev", "bridge0")
            self._ip("link", "set", "bridge0", "up")
        except BaseException:
            self.close()
            raise

    def add(self, name: str, *, project: bool = True) -> "Node":
        """A new node, also while others work. `project`: whether the project's source is there from the beginning."""
        assert name not in self.nodes, f"there was a node {name} already"
        address = f"{NETWORK}.{len(self.nodes) + 1}"
        with self._hosts.open("a", encoding="ascii") as hosts:  # in place: the nodes see this very file
            hosts.write(f"{address} {name}\n")
        source = [ROOT] if project else []
        files = self._folder / name
        files.mkdir()
        home, tmpdir = pwd.getpwuid(0).pw_dir, f"/local/{name}"
        settings = {
            "name": name,
            "files": str(files),
            "hosts": str(self._hosts),
            "home": home,
            "tmpdir": tmpdir,
            "read_only": [str(path) for path in (*source, *python_environment(), *self._read_only)],
            "shared": [str(path) for path in self._shared],
        }
        command = ["unshare", *NODE_NAMESPACES, "--fork", "--kill-child"]
        init = [sys.executable, str(ROOT / "tests" / "node_init.py"), json.dumps(settings)]
        process = start_and_wait([*self._enter(*PARENT_NAMESPACES), *command, *init], self._folder / f"{name}.log")
        directory = str(ROOT) if project else home
        node = Node(
            self, process, name=name, address=address, files=files, home=home, tmpdir=tmpdir, directory=directory
        )
        self.nodes[name] = node
        self._ip("link", "add", node.interface, "type", "veth", "peer", "name", "eth0", "netns", str(node.pid))
        self._ip("link", "set", node.interface, "master", "bridge0", "up")
        for arguments in (
            ("link", "set", "lo", "up"),
            ("address", "add", f"{address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("route", "add", "default", "via", ROUTER),
        ):
            done = node.run("ip", *arguments)
            assert done.returncode == 0, done.stderr
        return node

    def set_link(self, node: "Node", state: str) -> None:
        self._ip("link", "set", node.interface, state)

    def close(self) -> None:
        try:
            for node in self.nodes.values():
                node.kill()
        finally:
            end(self._process)

    def _enter(self, *namespaces: str) -> list[str]:
        return enter_namespaces(self._pid, *namespaces)

    def _ip(self, *arguments: str) -> None:
        """In the network that joins the nodes, but with process ids of this process."""
        command = [*self._enter("--net"), "ip", *arguments]
        subprocess.run(command, env={"PATH": SYSTEM_PATH}, check=True, stdin=subprocess.DEVNULL)


class Node:
    """One machine of the cluster. Made by `Machines.add`."""

    def __init__(
        self,
        machines: Machines,
        process: subprocess.Popen[str],
        *,
        name: str,
        address: str,
        files: Path,
        home: str,
        tmpdir: str,
        directory: str,
    ) -> None:
        self._machines, self._process, self._directory = machines, process, directory
        self._started: list[subprocess.Popen[bytes]] = []
        self.name, self.address, self.files, self.home, self.tmpdir = name, address, files, home, tmpdir
        self.interface = f"to-{name}"
        self.pid = child_of(child_of(process.pid))  # nsenter, unshare, and then the node's first process

    def path(self, inside: str | Path) -> Path:
        """Where this process finds a file of the node; `~` is the node's home directory."""
        found = Path(str(inside).replace("~", self.home, 1))
        return self.files / found.relative_to("/")

    def command(self, *command: str) -> list[str]:
        return [*enter_namespaces(self.pid, *NODE_NAMESPACES), "env", f"--chdir={self._directory}", *command]

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

    def start(self, *command: str, output: Path, **variables: str) -> subprocess.Popen[bytes]:
        """In the background, for as long as the node lives; `output` is a file of this process."""
        with output.open("ab") as file:
            process = subprocess.Popen(
                self.command(*command),
                env=self.environment(**variables),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._started.append(process)
        return process

    def environment(self, **variables: str) -> dict[str, str]:
        """Nothing of this process's own environment: it could name places that the node does not have."""
        return {
            "PATH": f"{Path(sys.executable).parent}:{SYSTEM_PATH}",
            "HOME": self.home,
            "TMPDIR": self.tmpdir,
            "USER": "root",
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            **variables,
        }

    def processes(self) -> dict[int, str]:
        """Command lines of everything that runs on the node, by process id of this process."""
        namespace = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(path / "ns" / "pid") == namespace:
                    found[int(path.name)] = (
                        (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    )
            except OSError:  # it has ended, or belongs to another user
                continue
        return {pid: line for pid, line in found.items() if line}

    def disconnect(self) -> None:
        """Pulls the network cable."""
        self._machines.set_link(self, "down")

    def reconnect(self) -> None:
        self._machines.set_link(self, "up")

    def kill(self) -> None:
        """Ends all its processes with kill -9. Its files stay, for the test to look at."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, signal.SIGKILL)
        end(self._process)
        for process in self._started:
            process.wait(CLOSE_SECONDS)


@contextmanager
def machines(folder: Path, *, shared: Sequence[Path] = (), read_only: Sequence[Path] = ()) -> Iterator[Machines]:
    made = Machines(folder, shared=shared, read_only=read_only)
    try:
        yield made
    finally:
        made.close()


def enter_namespaces(pid: int, *arguments: str) -> list[str]:
    user = ("--user", "--preserve-credentials") if _user_namespace() else ()
    return ["nsenter", f"--target={pid}", *user, *arguments, "--"]


def start_and_wait(command: Sequence[str], log: Path) -> subprocess.Popen[str]:
    """A process that lives until its input is closed, once it has printed that it is ready."""
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            env={"PATH": SYSTEM_PATH},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        end(process)
        raise AssertionError(f"{' '.join(command)} failed: {log.read_text(errors='replace')}")
    return process


def end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(CLOSE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def child_of(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)
