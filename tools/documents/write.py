"""python -m tools.documents.write: makes the bundled documents anew, the same ones every time."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from sampler import InputError
from sampler.cli import Parser, run_command
from tasks.sources import BUNDLED
from tools.documents.documents import files

EXAMPLES = """examples:
  python -m tools.documents.write
  python -m tools.documents.write --to FOLDER
"""


def contents() -> Iterator[tuple[str, str]]:
    """Every data file: its path and its text."""
    for name, documents in files():
        yield name, "".join(json.dumps(document, ensure_ascii=False) + "\n" for document in documents)


def write(folder: Path) -> int:
    """The number of documents written."""
    lines = 0
    for name, text in contents():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.unfinished")
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
        lines += text.count("\n")
    return lines


def main() -> None:
    parser = Parser(
        prog="python -m tools.documents.write", description="Makes the bundled documents anew.", examples=EXAMPLES
    )
    parser.add_argument("--to", metavar="FOLDER", help="a folder to write to (default: where the project reads them)")
    folder = parser.parse_args().to
    if folder is not None and not Path(folder).is_dir():
        raise InputError(f"--to {folder} is not a folder")
    target = BUNDLED if folder is None else Path(folder)
    print(f"{write(target)} documents in {target}")


if __name__ == "__main__":
    run_command(main)
