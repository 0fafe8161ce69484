"""A program: a Hub for one node, which serves the model in a directory, or answers 429 to every request.

Usage: node_hub.py PORT DIRECTORY [busy]
"""

import sys
import threading
from pathlib import Path

from small_hub import Answer, SmallHub

MODEL = "owner/name"


def main() -> None:
    port, directory, *busy = sys.argv[1:]
    hub = SmallHub({f"models/{MODEL}": Path(directory)})
    if busy:
        hub.fail("", *[Answer(status=429)] * 10_000)
    with hub.serving(int(port)):
        threading.Event().wait()


if __name__ == "__main__":
    main()
