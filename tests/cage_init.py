"""The first process of a cage: mounts what is private, brings up its network, and then only gathers the dead.

It ends when its input does, and the kernel ends everything else in the cage with it.
"""

import fcntl
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from cage import ADDRESSES, HOST

SET_FLAGS, SET_ADDRESS = 0x8914, 0x8916  # of a network interface
UP = 0x1 | 0x40


def main() -> None:
    folder, home, *seen = (Path(argument) for argument in sys.argv[1:])
    bring_up()
    socket.sethostname(HOST)
    hosts = folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{ADDRESSES[0]} {HOST}\n")
    bind(hosts, Path("/etc/hosts"))
    for place, private in ((home, folder / "home"), (Path("/tmp"), folder / "tmp")):
        hide(place, private, [*seen, *top_of(folder, place)])  # beside it the tests keep their files
    subprocess.run(["mount", "-t", "tmpfs", "cage", "/run"], check=True)
    Path("/run/sshd").mkdir()
    threading.Thread(target=end_with_input, daemon=True).start()
    print("ready", flush=True)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.2)


def bring_up() -> None:
    """The loopback device, with two more addresses on it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SET_FLAGS, struct.pack("16sh14x", b"lo", UP))
        for number, address in enumerate(ADDRESSES):
            name = f"lo:{number}".encode()
            packed = struct.pack("16sHH4s8x", name, socket.AF_INET, 0, socket.inet_aton(address))
            fcntl.ioctl(control, SET_ADDRESS, packed)


def hide(place: Path, private: Path, seen: Sequence[Path]) -> None:
    """Puts a private folder there, in which no more than what has to be seen is."""
    for path in seen:
        if path.is_relative_to(place) and path != place:
            inside = private / path.relative_to(place)
            inside.mkdir(parents=True, exist_ok=True)
            bind(path, inside)
    bind(private, place)


def top_of(path: Path, place: Path) -> list[Path]:
    """The first folder on the way from the place to the path, if it leads there."""
    return [place / path.relative_to(place).parts[0]] if path.is_relative_to(place) else []


def bind(source: Path, target: Path) -> None:
    subprocess.run(["mount", "--rbind", str(source), str(target)], check=True)


def end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
