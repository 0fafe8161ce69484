"""A program: a Hub for one node, which serves the model in a directory, or answers 429 to every request.

Usage: fake_hub_program.py PORT DIRECTORY [busy]
"""

import sys
import threading
from pathlib import Path

from fake_hub import Answer, FakeHub

MODEL = "owner/name"


def main() -> None:
    port, directory, *busy = sys.argv[1:]
    hub = FakeHub({f"models/{MODEL}": Path(directory)})
    if busy:
        hub.fail("", *[Answer(status=429)] * 10_000)
    with hub.serving(int(port)):
        threading.Event().wait()


if __name__ == "__main__":
    main()
