"""The program that watches a process, run by its path without any package. Knows a process id and a time.

Each byte on its input is a sign of life. It ends with its parent, or ends it.
"""

import os
import select
import signal
import sys

TICKS = 10


def watch(parent: int, seconds: float) -> None:
    silent = 0
    while silent < TICKS:
        heard, _, _ = select.select([0], [], [], seconds / TICKS)
        if not heard:
            silent += 1
        elif os.read(0, 4096):
            silent = 0
        else:
            return  # its end of the pipe is closed
    if os.getppid() == parent:  # never another process that got the number since
        os.kill(parent, signal.SIGKILL)


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]))
