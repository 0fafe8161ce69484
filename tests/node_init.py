"""First process of a node of `node_namespaces`: builds the node's file system, then waits until its input is closed.

The kernel ends every other process of the node together with this one.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

SYSTEM = ("usr", "etc", "opt", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "sys")
PRIVATE = {"tmp": 0o1777, "var/tmp": 0o1777, "run": 0o755, "run/sshd": 0o755}
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
LINKS = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1"}
KEPT_FLAGS = {"nosuid": os.ST_NOSUID, "nodev": os.ST_NODEV, "noexec": os.ST_NOEXEC, "noatime": os.ST_NOATIME}


def main() -> None:
    node = json.loads(sys.argv[1])
    socket.sethostname(node["name"])
    root = Path(node["files"])
    mount("--bind", root, root)
    add_system(root, node)
    add_devices(root / "dev")
    for path in map(Path, node["read_only"]):
        bind_read_only(path, inside(root, path))
    for path in map(Path, node["shared"]):
        mount("--rbind", path, make_directory(inside(root, path)))
    change_root(root)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then reaps the orphans that become our children
    print("ready", flush=True)
    sys.stdin.read()


def add_system(root: Path, node: dict[str, str]) -> None:
    for name in SYSTEM:
        path = Path("/") / name
        if path.is_symlink():
            (root / name).symlink_to(os.readlink(path))
        elif path.is_dir():
            bind_read_only(path, root / name)
    for name, mode in PRIVATE.items():
        make_directory(root / name).chmod(mode)
    for place in (node["home"], node["tmpdir"]):
        make_directory(inside(root, Path(place)))
    mount("--bind", Path(node["hosts"]), root / "etc" / "hosts")
    mount("-t", "proc", "proc", make_directory(root / "proc"))


def add_devices(dev: Path) -> None:
    mount("-t", "tmpfs", "-o", "mode=755", "dev", make_directory(dev))
    for name in DEVICES:
        (dev / name).touch()
        mount("--bind", Path("/dev") / name, dev / name)
    mount("-t", "devpts", "-o", "newinstance,ptmxmode=0666,mode=620", "devpts", make_directory(dev / "pts"))
    mount("-t", "tmpfs", "-o", "mode=1777", "shm", make_directory(dev / "shm"))
    for name, target in LINKS.items():
        (dev / name).symlink_to(target)


def bind_read_only(source: Path, target: Path) -> None:
    """Flags of the source are repeated: inside a user namespace they cannot be taken away."""
    mount("--rbind", source, make_directory(target))
    present = os.statvfs(source).f_flag
    kept = [name for name, flag in KEPT_FLAGS.items() if present & flag]
    mount("-o", ",".join(["remount", "bind", "ro", *kept]), target)


def change_root(root: Path) -> None:
    old = make_directory(root / "old-root")
    subprocess.run(["pivot_root", root, old], check=True)
    os.chdir("/")
    subprocess.run(["umount", "--lazy", "/old-root"], check=True)
    Path("/old-root").rmdir()


def mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True)


def inside(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def make_directory(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


if __name__ == "__main__":
    main()
