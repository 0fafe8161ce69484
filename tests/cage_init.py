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
from pathlib import Path

from cage import ADDRESSES, HOST

SET_FLAGS, SET_ADDRESS = 0x8914, 0x8916  # of a network interface
UP = 0x1 | 0x40


def main() -> None:
    folder, home, *seen = sys.argv[1:]
    bring_up()
    socket.sethostname(HOST)
    hosts = Path(folder) / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{ADDRESSES[0]} {HOST}\n")
    bind(str(hosts), "/etc/hosts")
    Path("/tmp/ray").mkdir(exist_ok=True)
    bind(f"{folder}/ray", "/tmp/ray")
    for path in seen:
        inside = Path(folder) / "home" / Path(path).relative_to(home)
        inside.mkdir(parents=True, exist_ok=True)
        bind(path, str(inside))
    bind(f"{folder}/home", home)
    Path("/run/sshd").mkdir(exist_ok=True)
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


def bind(source: str, target: str) -> None:
    subprocess.run(["mount", "--rbind", source, target], check=True)


def end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
