"""Runs inside a sandbox, as the candidate or as the tester. Passed to Python as text; uses only the standard library.

The candidate holds the generated program and answers calls. The tester holds the tests and calls the candidate by name;
only the tester reports a result. Both speak a small protocol over a pair of pipes. Values cross as JSON and are rebuilt
as exact built-in types: None, bool and str as they are, others as [tag, content]. An object of any other type stays
on its side; the other side gets a `Remote`, which can only be called and passed back.
"""

import builtins
import collections
import contextlib
import itertools
import json
import os
import resource
import sys
from typing import Any

REQUESTS, REPLIES, REPORT = 3, 4, 5  # file descriptors; what one sandbox writes as replies, the other reads as requests
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_DEPTH = 100  # of nested values
MAX_ITERATOR_ITEMS = 100_000
MAX_REASON_CHARACTERS = 300
COLLECTIONS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
COLLECTIONS |= {"deque": collections.deque, "keys": type({}.keys()), "values": type({}.values())}
BUILTIN_ERRORS = {name: value for name, value in vars(builtins).items() if isinstance(value, type)}


class ProtocolError(BaseException):
    """The other side is gone or does not follow the protocol. Not an Exception: tests do not catch it by accident."""


class Remote:
    """An object on the other side, identified by its number there or by its name in the candidate's program."""

    def __init__(self, channel: "Channel", key: int | str) -> None:
        self._channel, self._key = channel, key

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._channel.call(self._key, args, kwargs)


class Channel:
    """One side's end of the protocol. While it waits for a reply, it answers calls from the other side."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._names, self._objects, self._calls = names, list[Any](), 0

    def send(self, *message: Any) -> None:
        data = json.dumps(message).encode()
        data = len(data).to_bytes(4, "big") + data
        try:
            while data:
                data = data[os.write(REPLIES, data) :]
        except OSError:
            raise ProtocolError("the other side is gone") from None

    def receive(self) -> Any:
        size = int.from_bytes(self._read(4), "big")
        if size > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {size} bytes")
        try:
            message = json.loads(self._read(size))
        except (ValueError, RecursionError):
            raise ProtocolError("a message that is not JSON") from None
        if type(message) is not list or not message:
            raise ProtocolError("a message that is not a list")
        return message

    def _read(self, size: int) -> bytes:
        parts = []
        while size and (part := os.read(REQUESTS, min(size, 1 << 20))):
            parts.append(part)
            size -= len(part)
        if size:
            raise ProtocolError("the other side is gone")
        return b"".join(parts)

    def call(self, key: int | str, args: Any, kwargs: Any) -> Any:
        self._calls += 1
        number = self._calls
        self.send("call", number, key, self.encode(args), self.encode(kwargs))
        while (message := self.receive())[0] == "call":
            self.answer(message)
        match message:
            case ["returned", int(answered), value] if answered == number:
                try:
                    return self.decode(value)
                except (TypeError, ValueError, NameError, ArithmeticError, RecursionError) as error:
                    raise ProtocolError(f"a value that cannot be rebuilt: {error}") from None
            case ["raised", int(answered), str(name), str(text)] if answered == number:
                raise rebuilt_error(name, text)
        raise ProtocolError("an unexpected message")

    def answer(self, message: Any) -> None:
        """Execute a call and send what it returned or raised."""
        match message:
            case ["call", int(number), key, args, kwargs]:
                try:
                    value = self._own(key)(*self.decode(args), **self.decode(kwargs))
                    reply: tuple[Any, ...] = ("returned", number, self.encode(value))
                except ProtocolError:
                    raise
                except BaseException as error:
                    reply = ("raised", number, *described_error(error))
                self.send(*reply)
            case _:
                raise ProtocolError("an unexpected message")

    def _own(self, key: Any) -> Any:
        """An object of this side by its name or number."""
        if type(key) is str and key in self._names:
            return self._names[key]
        if type(key) is int and 0 <= key < len(self._objects):
            return self._objects[key]
        raise NameError(f"name {key!r} is not defined")

    def serve(self) -> None:
        while True:
            self.answer(self.receive())

    def encode(self, value: Any, depth: int = 0) -> Any:
        """As JSON. Instances of subclasses lose their class: a namedtuple becomes a tuple, a Counter a dict."""
        if depth > MAX_DEPTH:
            raise ValueError(f"a value is nested deeper than {MAX_DEPTH} levels")
        if value is None or value is True or value is False:
            return value
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            return ["int", hex(int.__int__(value))]
        if isinstance(value, float):
            return ["float", float.hex(value)]
        if isinstance(value, complex):
            return ["complex", [float.hex(value.real), float.hex(value.imag)]]
        if isinstance(value, bytes | bytearray):
            return ["bytes" if isinstance(value, bytes) else "bytearray", value.hex()]
        if isinstance(value, range):
            return ["range", [hex(part) for part in (value.start, value.stop, value.step)]]
        if isinstance(value, Remote):
            return ["yours", value._key]
        for tag, kind in COLLECTIONS.items():
            if isinstance(value, kind):
                return [tag, [self.encode(item, depth + 1) for item in kind.__iter__(value)]]
        if isinstance(value, dict):
            pairs = dict.items(value)
            return ["dict", [[self.encode(key, depth + 1), self.encode(item, depth + 1)] for key, item in pairs]]
        if hasattr(type(value), "__next__"):
            items = list(itertools.islice(value, MAX_ITERATOR_ITEMS + 1))
            if len(items) > MAX_ITERATOR_ITEMS:
                raise ValueError(f"an iterator has more than {MAX_ITERATOR_ITEMS} items")
            return ["iterator", [self.encode(item, depth + 1) for item in items]]
        self._objects.append(value)
        return ["mine", len(self._objects) - 1]

    def decode(self, data: Any, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        if data is None or type(data) in (bool, str):
            return data
        if type(data) is not list or len(data) != 2:
            raise ValueError("not [tag, content]")
        tag, content = data
        match tag:
            case "int":
                return int(content, 16)
            case "float":
                return float.fromhex(content)
            case "complex":
                return complex(*map(float.fromhex, content))
            case "bytes":
                return bytes.fromhex(content)
            case "bytearray":
                return bytearray.fromhex(content)
            case "range":
                return range(*(int(part, 16) for part in content))
            case "dict":
                return {self.decode(key, depth + 1): self.decode(item, depth + 1) for key, item in content}
            case "iterator":
                return iter([self.decode(item, depth + 1) for item in content])
            case "mine" if type(content) is int:
                return Remote(self, content)
            case "yours":
                return self._own(content)
            case "list" | "tuple" | "set" | "frozenset" | "deque":
                return COLLECTIONS[tag](self.decode(item, depth + 1) for item in content)
            case "keys" | "values":
                items = (self.decode(item, depth + 1) for item in content)
                return dict.fromkeys(items).keys() if tag == "keys" else dict(enumerate(items)).values()
        raise ValueError(f"unknown tag {tag!r}")


def described_error(error: BaseException) -> tuple[str, str]:
    name, text = type(error).__name__, ""
    with contextlib.suppress(BaseException):
        text = str.__str__(str(error))[:MAX_REASON_CHARACTERS]
    return name, text


def rebuilt_error(name: str, text: str) -> Exception:
    """The built-in exception of that name, or a RuntimeError. Never StopIteration, which would end a test's loop."""
    kind = BUILTIN_ERRORS.get(name)
    if kind is not None and issubclass(kind, Exception) and not issubclass(kind, StopIteration | StopAsyncIteration):
        with contextlib.suppress(TypeError):
            error: Exception = kind(text)
            return error
    return RuntimeError(f"{name}: {text}")


def run_candidate(job: dict[str, Any]) -> None:
    """Execute the program, then answer calls. If the program fails, every call raises its error."""
    os.close(REPORT)
    program: dict[str, Any] = {}
    channel = Channel(program)
    try:
        exec(compile(job["program"], "<program>", "exec"), program)
    except BaseException as error:
        failure = described_error(error)
        while True:
            channel.send("raised", channel.receive()[1], *failure)
    channel.serve()


def run_tester(job: dict[str, Any]) -> None:
    """Execute the tests against the candidate's functions and report the result."""
    channel = Channel({})
    namespace: dict[str, Any] = {}
    try:
        exec(compile(job["setup"], "<setup>", "exec"), namespace)
        namespace.update({name: Remote(channel, name) for name in job["names"]})
        exec(compile(job["tests"], "<tests>", "exec"), namespace)
        result = {"passed": True, "reason": ""}
    except BaseException as error:
        result = {"passed": False, "reason": ": ".join(filter(None, described_error(error)))}
    os.write(REPORT, json.dumps(result).encode() + b"\n")


def prepare(job: dict[str, Any]) -> None:
    """Switch to the unprivileged user, if the supervisor has not done so, and set the resource limits."""
    if job["user"] is not None:
        os.setgroups([])
        os.setresgid(job["user"], job["user"], job["user"])
        os.setresuid(job["user"], job["user"], job["user"])
    for name, value in job["limits"].items():
        kind = getattr(resource, name)
        if kind == resource.RLIMIT_NPROC:
            check_thread_limit(value)
        resource.setrlimit(kind, (value, value))


def check_thread_limit(value: int) -> None:
    """Check that a limit of one prevents a second thread: the kernel does not limit the machine's root."""
    import _thread

    resource.setrlimit(resource.RLIMIT_NPROC, (1, value))
    try:
        _thread.start_new_thread(int, ())
    except RuntimeError:
        return
    raise OSError("the number of threads cannot be limited")


def main() -> None:
    with os.fdopen(0, "rb") as file:
        job = json.load(file)
    os.open("/dev/null", os.O_RDONLY)  # becomes standard input
    try:
        prepare(job)
    except OSError as error:
        os.write(REPORT, f"failed {error}\n".encode())
        return
    os.write(REPORT, b"ready\n")
    try:
        {"candidate": run_candidate, "tester": run_tester}[job["role"]](job)
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
