"""Reads the commands in README and docs, and runs one of them."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from orchestrator.cli.__main__ import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / page for page in ("README.md", "CONTRIBUTING.md", "tools/README.md")),
    *(ROOT / page for page in ("sampler/tiny/README.md", "tasks/bundled/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
README = PAGES[0].read_text(encoding="utf-8")
PROGRAM = re.compile(  # sub-commands of reuse-sweep, also as modules, and modules of tools
    rf"reuse-sweep ((?:tasks run|bench sweep|slurm submit|slurm status|{'|'.join(COMMANDS)})\b)"
    r"|python -m orchestrator\.((?:slurm submit|slurm status|sweep|status|report|export)\b)"
    r"|python -m (tools[.a-z_]*)"
)


def programs(text: str) -> list[str]:
    """The programs of this project in a text: sub-commands of reuse-sweep, and modules of tools."""
    return ["".join(found) for found in PROGRAM.findall(text)]


def commands(page: Path) -> Iterator[str]:
    """The lines of its shell blocks, without comments; continued lines are joined."""
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        joined = re.sub(r"(\\|(?<=\|))\n\s*", " ", block)
        yield from (re.sub(r"\s+#.*", "", line).strip() for line in joined.splitlines() if line.strip())


ALL = sorted({command for page in PAGES for command in commands(page)})
OURS = [command for command in ALL if PROGRAM.search(command) and not command.startswith("ray ")]


def run_page_command(command: str, folder: Path) -> str:
    """The output of a command, run with this Python, without a GPU and without the Hub."""
    here = {"BROWSER": "true", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment = {**os.environ, **here, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    script = f'reuse-sweep() {{ python -m orchestrator.cli "$@"; }}; {command.replace(".venv/bin/", "")}'
    words = ["bash", "-euo", "pipefail", "-c", script]
    ran = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
