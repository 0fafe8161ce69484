"""Addresses where a cluster is, or is not, are told apart at once."""

import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from orchestrator.running import environment, reach
from orchestrator.running.reach import asks_for_token, check_listening, only_on_loopback
from sampler import InputError


def listener(host: str) -> socket.socket:
    return socket.create_server((host, 0))


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> str:
    """Another address of this machine, whether it has a network or not."""
    monkeypatch.setattr(reach, "_own_address", lambda: "127.0.0.2")
    return "127.0.0.2"


def test_somebody_listens(own: str) -> None:
    with ExitStack() as stack:
        port = stack.enter_context(listener("127.0.0.1")).getsockname()[1]
        for address in (f"127.0.0.1:{port}", f"localhost:{port}", f"ray://127.0.0.1:{port}"):
            check_listening(address)
            assert only_on_loopback(address)
        everywhere = stack.enter_context(listener("0.0.0.0")).getsockname()[1]
        assert not only_on_loopback(f"127.0.0.1:{everywhere}")
        elsewhere = stack.enter_context(listener(own)).getsockname()[1]
        check_listening(f"127.0.0.1:{elsewhere}")
        assert not only_on_loopback(f"127.0.0.1:{elsewhere}"), "where Ray looks for it"


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "[::1]:1", "ray://127.0.0.1:1", "127.0.0.1:99999999", f"{'a' * 70}:1"]
)
def test_nobody_listens(address: str, own: str) -> None:
    del own
    with pytest.raises(InputError, match=re.escape(f"--address {address}: no Ray cluster can be joined there (")):
        check_listening(address)
    assert not only_on_loopback(address)


@pytest.mark.parametrize("address", ["auto", "local", "nonsense", "host:", ":6379", "host:x"])
def test_what_is_left_to_ray(address: str) -> None:
    check_listening(address)
    assert not only_on_loopback(address)


class Locked(grpc.GenericRpcHandler):
    """A cluster's server that answers everybody, or nobody without a token."""

    def __init__(self, locked: bool) -> None:
        self._locked = locked

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        del handler_call_details
        return grpc.unary_unary_rpc_method_handler(self._answer)

    def _answer(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        if self._locked:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
        return request


@pytest.mark.parametrize("locked", [True, False])
def test_whether_a_cluster_of_this_machine_asks_for_a_token(locked: bool) -> None:
    server = grpc.server(ThreadPoolExecutor(1), handlers=[Locked(locked)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert asks_for_token(f"127.0.0.1:{port}") is locked
        assert not any(asks_for_token(address) for address in ("192.0.2.9:6379", "auto", "head:6379"))
    finally:
        server.stop(None).wait()


def test_the_token_is_shown_to_a_cluster_of_this_machine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path)})
    environment.prepare(local=False, token=True)
    assert "RAY_AUTH_MODE" not in os.environ, "there is none"
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").touch()
    environment.prepare(local=False)
    assert "RAY_AUTH_MODE" not in os.environ
    environment.prepare(local=False, token=True)
    assert os.environ["RAY_AUTH_MODE"] == "token"
