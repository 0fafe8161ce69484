"""What every command shares: flags from declared settings, errors and exit codes, JSON lines in and out."""

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from typing import Any, NoReturn, TextIO, TypeVar, cast

from orchestrator.core.untrusted import printable
from orchestrator.planning.fields import OPTIONS, Setting, repeated, settings_of
from sampler.errors import InputError, Problems, did_you_mean

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """An argument parser that raises InputError and does not accept abbreviated flags."""

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


def add_settings(parser: argparse.ArgumentParser, settings: Mapping[str, Setting]) -> None:
    """Adds a flag for each setting. The values stay text; a flag that is not given is absent from the namespace."""
    groups: dict[str, Any] = {OPTIONS: parser}
    for setting in settings.values():
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(setting.group)
        group = groups[setting.group]
        common: dict[str, Any] = {"help": setting.full_help.replace("%", "%%"), "dest": setting.name}
        common["default"] = argparse.SUPPRESS
        if setting.positional:
            number = "+" if setting.many else None
            group.add_argument(setting.name, metavar=setting.metavar, nargs=number, help=common["help"])
        elif setting.negatable:
            group.add_argument(setting.flag, action=argparse.BooleanOptionalAction, **common)
        elif setting.kind is bool and not setting.many:
            group.add_argument(setting.flag, action="store_true", **common)
        else:
            action = "append" if setting.repeatable else "store"
            group.add_argument(setting.flag, metavar=setting.metavar, action=action, **common)


def aliases(settings: Mapping[str, Setting]) -> dict[str, str]:
    """The key of each setting that has aliases, by alias."""
    return {alias: setting.key for setting in settings.values() for alias in setting.aliases}


def parse_values(parser: Parser, settings: Mapping[str, Setting], arguments: Sequence[str]) -> dict[str, Any]:
    """The checked values of all settings, by field name; raises an InputError with all problems."""
    problems = Problems()
    add_settings(parser, settings)
    parser.usage = parser.usage or _usage(parser.prog, settings)
    raw = parse_flags(parser, settings, arguments, problems)
    settings = as_typed(settings, arguments)
    values: dict[str, Any] = {}
    for name, setting in settings.items():
        if name in raw:
            with problems.collect():
                values[name] = setting.read(setting.flag, raw[name])
                problems.sentences += setting.problems(values[name])
        elif setting.required:
            problems.sentences.append(setting.missing)
        else:
            values[name] = setting.default
    problems.check()
    return values


def as_typed(settings: Mapping[str, Setting], arguments: Sequence[str]) -> Mapping[str, Setting]:
    """The settings under the aliases that were typed, so that errors name the flags as the user wrote them."""
    typed = {word[2:].partition("=")[0].replace("_", "-") for word in arguments if word.startswith("--")}
    names = {setting.key: next(iter(typed.intersection(setting.aliases)), "") for setting in settings.values()}
    return {
        name: replace(setting, typed_as=names[setting.key]) if names[setting.key] else setting
        for name, setting in settings.items()
    }


def _usage(prog: str, settings: Mapping[str, Setting]) -> str:
    required = [setting for setting in settings.values() if setting.required]
    words = [f"{setting.flag} {setting.metavar}" for setting in required if not setting.positional]
    words += [setting.metavar + (" ..." if setting.many else "") for setting in required if setting.positional]
    return " ".join([prog, *words, "[flags]"])


def parse_options(parser: Parser, cls: type[T], arguments: Sequence[str]) -> T:
    """The options of a command, declared by the fields of a dataclass."""
    return cls(**parse_values(parser, settings_of(cls), arguments))


def parse_flags(
    parser: Parser, settings: Mapping[str, Setting], arguments: Sequence[str], problems: Problems
) -> dict[str, Any]:
    """The flags as text, by the names of their settings; the values of a repeated flag are joined by commas.

    Flags may be written with _ and by their aliases: lm-eval writes --num_fewshot.
    """
    names, words = aliases(settings), []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        key = flag[2:].replace("_", "-")
        words.append(f"--{names.get(key, key)}{equals}{value}" if argument.startswith("--") else argument)
    try:
        namespace, unknown = parser.parse_known_args(words)
    except InputError as error:
        message = str(error)
        for setting in as_typed(settings, arguments).values():
            key = names.get(setting.typed_as, setting.key)
            message = message.replace(f"argument --{key}:", f"argument {setting.flag}:")
        raise InputError(message) from None
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        hints = [did_you_mean(word, flags, cutoff=0.6) for word in unknown if word.startswith("--")]
        hint = next(filter(None, hints), "see --help")
        problems.sentences.append(f"unrecognized arguments: {' '.join(unknown)} ({hint})")
    raw = vars(namespace)
    for name, setting in settings.items():
        if name in raw and setting.repeatable and not setting.verbatim:
            raw[name] = ",".join(raw[name])
    return raw


class Output:
    """Standard output while a command runs. The command ends with an error if a write fails.

    With `defer_errors`, only `check` raises it, after the command has finished: a sweep continues without its terminal.
    """

    def __init__(self, stream: TextIO | None, *, defer_errors: bool) -> None:
        self._defer_errors = defer_errors
        self._problem: Exception | None = None
        if stream is None:
            self._problem = InputError("standard output is closed; redirect it to a file or to /dev/null")
            stream = open(1, "w", closefd=False)  # noqa: SIM115 - which is /dev/null by now
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot print × shows ?
        self._stream = stream

    def check(self) -> None:
        """Raises the error of an earlier write, if any."""
        if self._problem is not None:
            raise self._problem

    def write(self, text: str) -> int:
        with self.writing():
            self._stream.write(text)
        return len(text)

    def write_utf8(self, text: str) -> None:
        """Writes in UTF-8, whatever the terminal's encoding."""
        with self.writing():
            self._stream.buffer.write(text.encode())
            self._stream.flush()

    def flush(self) -> None:
        with self.writing():
            self._stream.flush()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keeps the error of a failed write inside the block, and raises it unless errors are deferred."""
        try:
            yield
        except OSError as error:
            # Otherwise Python would try to write the buffered text again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            cannot = InputError(f"standard output cannot be written ({error.strerror})")
            self._problem = error if isinstance(error, BrokenPipeError) else cannot  # as in `| head`: not an error
            if not self._defer_errors:
                raise self._problem from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def run_command(main: Callable[[], None], *, defer_output_errors: bool = False) -> NoReturn:
    """Runs a command and exits. User errors are printed, one sentence each, and end with exit code 2."""
    open_closed_descriptors()
    output = Output(sys.stdout, defer_errors=defer_output_errors)
    try:
        with redirect_stdout(cast(TextIO, output)):
            if not defer_output_errors:
                output.check()
            try:
                main()
            except SystemExit as ended:  # of --help
                if ended.code:
                    raise
            finally:
                output.flush()
            output.check()
    except InputError as error:
        for sentence in error.sentences:
            with suppress(OSError):  # standard error cannot be written either
                say("error:", " ".join(sentence.splitlines()), error=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)
    sys.exit(0)


def open_closed_descriptors() -> None:
    """Opens /dev/null in place of closed standard streams, so that no file of the command gets their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - which is /dev/null by now


def say(*words: object, sep: str = " ", error: bool = False) -> None:
    """Prints text that may contain untrusted data: characters that would control the terminal are left out."""
    print(printable(sep.join(map(str, words))), file=sys.stderr if error else sys.stdout, flush=True)


def sub_command(command: str, arguments: Sequence[str], known: Sequence[str]) -> str:
    """The first word, if it is one of the known sub-commands; "" if there is none, and InputError for another word."""
    word = "" if not arguments or arguments[0].startswith("-") else arguments[0]
    if word and word not in known:
        hint = did_you_mean(word, known, otherwise=f"it may be {' or '.join(known)}, or be left out")
        raise InputError(f"unknown command {f'{command} {word}'!r}; {hint}")
    return word


def announce(text: str) -> None:
    """Prints a progress message on a terminal: importing torch or loading a model takes seconds."""
    if sys.stderr.isatty():
        say(text, error=True)


class Line:
    """An input line that is a JSON object. Errors inside `with line:` get its number."""

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
            raise InputError(f'"{key}" must be a list of token ids (got {_shown(value)})')
        for item in value:
            if not isinstance(item, int) or isinstance(item, bool):
                raise InputError(f'"{key}" must contain token ids, which are whole numbers (got {_shown(item)})')
        return tuple(value)

    def text(self, key: str) -> str:
        value = self.field(key)
        if not isinstance(value, str):
            raise InputError(f'"{key}" must be text (got {_shown(value)})')
        return value

    def messages(self) -> list[dict[str, str]]:
        value = self.field("messages")
        for message in value if isinstance(value, list) and value else [value]:
            named = message if isinstance(message, dict) else {}
            if not isinstance(named.get("role"), str) or not isinstance(named.get("content"), str):
                raise InputError(f'"messages" must contain {{"role": text, "content": text}} (got {_shown(message)})')
        messages: list[dict[str, str]] = value
        return messages

    def field(self, key: str) -> Any:
        if key not in self.fields:
            raise InputError(f'"{key}" is missing (the line has {_shown(list(self.fields))})')
        return self.fields[key]


def read_lines() -> list[Line]:
    """All lines of standard input, checked before a model is loaded."""
    if sys.stdin is None:
        raise InputError("standard input is closed; it must contain JSON lines")
    if sys.stdin.isatty():
        announce("reading JSON lines from standard input (see --help), until Ctrl-D")
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
        json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()  # fails for what cannot be printed again
    except json.JSONDecodeError as error:
        raise InputError(f"not valid JSON ({error.msg} at column {error.colno})") from None
    except UnicodeDecodeError as error:
        raise InputError(f"not valid UTF-8 (byte {error.object[error.start]:#x} at {error.start + 1})") from None
    except (InputError, ValueError, RecursionError) as error:
        raise InputError(f"not valid JSON ({error})") from None
    if not isinstance(fields, dict):
        raise InputError(f'the line must be a JSON object such as {{"id": 1, …}} (got {_shown(fields)})')
    return fields


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise InputError(f"{_shown(repeated(name for name, _ in pairs))} occurs twice")
    return fields


def write_in_order(results: Iterable[tuple[int, dict[str, Any]]], total: int) -> None:
    """Prints results as JSON lines in the order of their input, each as soon as the ones before it are printed."""
    from tqdm import tqdm  # only here: it takes a while to import

    for result in _ordered(tqdm(results, total=total, unit="line", disable=None)):
        cast(Output, sys.stdout).write_utf8(json.dumps(result, ensure_ascii=False) + "\n")


def _ordered(results: Iterable[tuple[int, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    waiting: dict[int, dict[str, Any]] = {}
    next_index = 0
    for index, result in results:
        waiting[index] = result
        while next_index in waiting:
            yield waiting.pop(next_index)
            next_index += 1


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}..."
