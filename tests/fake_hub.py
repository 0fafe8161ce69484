"""A Hub on the loopback device that serves one model and one dataset, with failures on request."""

import hashlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c0ffee" * 6 + "1234"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A failure: an HTTP status, or no answer at all."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    reset: bool = False  # else a request without a status is left hanging


HANG, RESET = Answer(), Answer(reset=True)


class FakeHub:
    """`folders` maps "models/owner/name" and "datasets/owner/name" to files. `fail` makes requests fail."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self.folders, self.requests = folders, list[str]()
        self._failures: list[tuple[str, Answer]] = []
        self._closed, self._guard = threading.Event(), threading.Lock()
        self.address = ""

    def fail(self, part: str, *answers: Answer) -> None:
        """The next requests whose "METHOD path" contains `part` get these answers, one each."""
        self._failures += [(part, answer) for answer in answers]

    def count(self, part: str) -> int:
        return sum(part in line for line in self.requests)

    @contextmanager
    def serving(self, port: int = 0) -> Iterator["FakeHub"]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.handle(self)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        self.address = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            self._closed.set()
            server.shutdown()
            thread.join()
            server.server_close()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        line = f"{request.command} {request.path}"
        failure = self._next_failure(line)
        if failure is None:
            self._serve(request)
        elif failure.status is not None:
            _reply(request, failure.status, b"{}", failure.headers)
        elif failure.reset:
            linger = struct.pack("ii", 1, 0)  # closing sends RST
            request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            request.connection.close()
        else:
            self._closed.wait()

    def _next_failure(self, line: str) -> Answer | None:
        with self._guard:
            self.requests.append(line)
            for place, (part, answer) in enumerate(self._failures):
                if part in line:
                    del self._failures[place]
                    return answer
        return None

    def _serve(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        for repository, folder in self.folders.items():
            resolve = "/" + repository.removeprefix("models/") + "/resolve/"
            if path.startswith(f"/api/{repository}/tree/"):
                listing = [
                    {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}
                    for name, data in _files(folder).items()
                ]
                return _reply(request, 200, json.dumps(listing).encode(), {})
            if path == f"/api/{repository}" or path.startswith(f"/api/{repository}/revision/"):
                siblings = [{"rfilename": name} for name in _files(folder)]
                info = {"id": repository.partition("/")[2], "sha": COMMIT, "siblings": siblings}
                return _reply(request, 200, json.dumps(info).encode(), {})
            if path.startswith(resolve):
                name = path.removeprefix(resolve).partition("/")[2]
                data = _files(folder).get(name)
                if data is not None:
                    return _reply(request, 200, data, {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": COMMIT})
                return _reply(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
        return _reply(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"})


def _files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _reply(request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]) -> None:
    request.send_response_only(status)
    for name, value in {"Content-Type": "application/json", **headers, "Content-Length": str(len(body))}.items():
        request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)
