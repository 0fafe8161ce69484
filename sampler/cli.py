"""What the sampler's commands share: flags, JSON lines in and out, one-sentence errors. Knows no decoding."""

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from tqdm import tqdm

from sampler.errors import InputError
from sampler.policy import GRAMMAR

MODEL_HELP = "tiny (the bundled model; a folder of that name is ./tiny), a folder, or a Hub id with optional @revision"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence too, and which takes no flag for another it begins like."""

    def __init__(self, *, prog: str, description: str, examples: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see --help)")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help=MODEL_HELP)
    parser.add_argument("--policy", default="k1", help=f"{GRAMMAR} (default: k1)")
    parser.add_argument("--subset-size", type=int, help="layers in first, middle, last (default: 12, or a third)")
    parser.add_argument("--batch-size", type=int, default=1, help="documents decoded together (default: 1)")
    add_device_flags(parser)


def add_device_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: auto)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")


def add_decode_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threshold", type=float, default=0.95, help="reveal what is surer than this; 1: one by one")
    parser.add_argument("--small-block", type=int, default=8, help="positions denoised at a time (default: 8)")
    parser.add_argument(
        "--block-cache", action=argparse.BooleanOptionalAction, default=True, help="small passes where possible"
    )


def run_command(main: Callable[[], None]) -> NoReturn:
    """Runs a command; what a person got wrong ends in a sentence for each thing and exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot write × shows ? there
    try:
        try:
            main()
        finally:
            if sys.stdout is not None:  # None where the caller closed it
                sys.stdout.flush()
    except InputError as error:
        for sentence in error.sentences:
            print("error:", " ".join(sentence.splitlines()), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever read our output has seen enough
        _discard_output()
        sys.exit(141)
    sys.exit(0)


class Line:
    """One input line, known to be a JSON object; its number is added to complaints by `with line:`."""

    def __init__(self, number: int, fields: Mapping[str, Any]) -> None:
        self.number, self.fields = number, fields

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, InputError):
            raise InputError(f"line {self.number}: {error}") from None

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.field(key)
        if not isinstance(value, list):
            raise InputError(f'"{key}" is {_shown(value)}; a list of token ids was expected')
        for item in value:
            if not isinstance(item, int) or isinstance(item, bool):
                raise InputError(f'"{key}" holds {_shown(item)}; token ids are whole numbers')
        return tuple(value)

    def text(self, key: str) -> str:
        value = self.field(key)
        if not isinstance(value, str):
            raise InputError(f'"{key}" is {_shown(value)}; a text was expected')
        return value

    def messages(self) -> list[dict[str, str]]:
        value = self.field("messages")
        for message in value if isinstance(value, list) and value else [value]:
            named = message if isinstance(message, dict) else {}
            if not isinstance(named.get("role"), str) or not isinstance(named.get("content"), str):
                raise InputError(f'"messages" holds {_shown(message)}; {{"role": text, "content": text}} was expected')
        messages: list[dict[str, str]] = value
        return messages

    def field(self, key: str) -> Any:
        if key not in self.fields:
            raise InputError(f'"{key}" is missing; the line has {_shown(list(self.fields))}')
        return self.fields[key]


def read_lines() -> list[Line]:
    """All lines of the standard input; a broken one is named before anything is loaded."""
    if sys.stdin is None:
        raise InputError("the standard input is closed; JSON lines were expected")
    lines = []
    for number, text in enumerate(sys.stdin.buffer, start=1):
        if text.strip():
            line = Line(number, {})
            with line:
                line.fields = _parse(text)
                line.field("id")
            lines.append(line)
    return lines


def _parse(text: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(text.strip().decode("utf-8-sig"), object_pairs_hook=_object)
        json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()  # what could not be printed again
    except json.JSONDecodeError as error:
        raise InputError(f"not valid JSON ({error.msg} at column {error.colno})") from None
    except UnicodeDecodeError as error:
        raise InputError(f"not valid UTF-8 (byte {error.object[error.start]:#x} at {error.start + 1})") from None
    except (InputError, ValueError, RecursionError) as error:
        raise InputError(f"not valid JSON ({error})") from None
    if not isinstance(fields, dict):
        raise InputError(f'{_shown(fields)} is no JSON object such as {{"id": 1, …}}')
    return fields


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise InputError(f"one of the names {_shown([name for name, _ in pairs])} is given twice")
    return fields


def write_in_order(results: Iterable[tuple[int, dict[str, Any]]], total: int) -> None:
    """Prints results as JSON lines in the order of their input, each as soon as those before it are out."""
    for result in _ordered(tqdm(results, total=total, unit="line", disable=None)):
        _print(json.dumps(result, ensure_ascii=False))


def _ordered(results: Iterable[tuple[int, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    early: dict[int, dict[str, Any]] = {}
    wanted = 0
    for index, result in results:
        early[index] = result
        while wanted in early:
            yield early.pop(wanted)
            wanted += 1


def _print(line: str) -> None:
    """JSON is UTF-8, whatever the terminal's encoding; a full disk is told in one sentence too."""
    if sys.stdout is None:
        raise InputError("the standard output is closed; results could not be written")
    try:
        sys.stdout.buffer.write(f"{line}\n".encode())
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _discard_output()
        raise InputError(f"results could not be written ({error.strerror}); the standard output was refused") from None


def _discard_output() -> None:
    """Python would complain once more at its exit about what it could not write."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}..."
