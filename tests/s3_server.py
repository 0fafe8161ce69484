"""moto's S3 server in a process of its own on the loopback device; run as a script it serves until it is ended.

It speaks S3's protocol, keeps objects in memory and takes any credentials.
"""

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "never-shown",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class S3Server:
    """Where the server listens, and what a test may do to it."""

    def __init__(self, port: int) -> None:
        self._port = port

    def url(self, path: str) -> str:
        return f"s3://{path}?endpoint_override=http://127.0.0.1:{self._port}&scheme=http&region=us-east-1"

    def make_bucket(self, name: str) -> None:
        self._ask("PUT", name)

    def delete_bucket(self, name: str) -> None:
        self._ask("DELETE", name)

    def _ask(self, method: str, path: str) -> None:
        signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"}
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}/{path}", method=method, headers=signed)
        with urllib.request.urlopen(request) as answer:
            assert answer.status < 300


@contextmanager
def s3_server() -> Iterator[S3Server]:
    words = [sys.executable, "-W", "ignore", str(Path(__file__))]
    environment = {**os.environ, **CREDENTIALS}
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        yield S3Server(int(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    server._thread.join()
