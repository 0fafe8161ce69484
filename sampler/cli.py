"""What the sampler's commands share: flags, JSON lines in and out, one-sentence errors. Knows no decoding."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from tqdm import tqdm

from sampler.errors import InputError
from sampler.policy import GRAMMAR


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence too."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see --help)")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a local folder, or a Hub id with an optional @revision")
    parser.add_argument("--policy", default="k1", help=f"{GRAMMAR} (default: k1)")
    parser.add_argument("--subset-size", type=int, help="layers in first, middle, last (default: 12, or a third)")
    parser.add_argument("--batch-size", type=int, default=1, help="rows decoded together (default: 1)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: auto)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument("--ids", action="store_true", help="lines hold token ids instead of text")


def run_command(main: Callable[[], None]) -> NoReturn:
    """Runs a command; what a person got wrong ends in one sentence and exit code 2."""
    try:
        main()
        sys.stdout.flush()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


class Line:
    """One input line, already known to be an object with an id; asks for its fields complain by line number."""

    def __init__(self, number: int, fields: Mapping[str, Any]) -> None:
        self.number, self.fields = number, fields
        if "id" not in fields:
            raise self.error('has no "id"')

    def error(self, what: str) -> InputError:
        return InputError(f"line {self.number} {what}")

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self._field(key)
        if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
            raise self.error(f'has "{key}" {_shown(value)}; a list of token ids was expected')
        return tuple(value)

    def text(self, key: str) -> str:
        value = self._field(key)
        if not isinstance(value, str):
            raise self.error(f'has "{key}" {_shown(value)}; a text was expected')
        return value

    def messages(self) -> list[dict[str, str]]:
        value = self._field("messages")
        valid = isinstance(value, list) and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
        )
        if not valid or not value:
            raise self.error('has "messages" that are no list of {"role": …, "content": …}')
        messages: list[dict[str, str]] = value
        return messages

    def checked(self, check: Callable[[], None]) -> None:
        """Runs a check of this line's content; its complaint gets the line's number."""
        try:
            check()
        except InputError as error:
            raise InputError(f"line {self.number}: {error}") from None

    def _field(self, key: str) -> Any:
        if key not in self.fields:
            raise self.error(f'has no "{key}"')
        return self.fields[key]


def read_lines(stream: Iterable[bytes]) -> list[Line]:
    """All input lines; a broken one is named before anything is loaded."""
    lines = []
    for number, text in enumerate(stream, start=1):
        if not text.strip():
            continue
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"line {number} is not valid JSON ({error.msg} at column {error.colno})") from None
        except UnicodeDecodeError:
            raise InputError(f"line {number} is not valid UTF-8") from None
        if not isinstance(fields, dict):
            raise InputError(f"line {number} is {_shown(fields)}; a JSON object was expected")
        lines.append(Line(number, fields))
    return lines


def write_in_order(results: Iterable[tuple[int, dict[str, Any]]], total: int) -> None:
    """Prints results as JSON lines in the order of their input, each as soon as those before it are out."""
    for result in _ordered(tqdm(results, total=total, unit="line", disable=None)):
        print(json.dumps(result, ensure_ascii=False), flush=True)


def _ordered(results: Iterable[tuple[int, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    early: dict[int, dict[str, Any]] = {}
    wanted = 0
    for index, result in results:
        early[index] = result
        while wanted in early:
            yield early.pop(wanted)
            wanted += 1


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}..."
