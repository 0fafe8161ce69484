"""Which cluster a sweep joins, and that an address without a cluster is detected at once."""

import os
import re
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from orchestrator.running import environment
from orchestrator.running.environment import check_listening, is_this_machine, only_on_loopback
from sampler import InputError


def listener(host: str) -> socket.socket:
    return socket.create_server((host, 0))


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> str:
    """Another address of this machine, whether it has a network or not."""
    monkeypatch.setattr(environment, "_own_address", lambda: "127.0.0.2")
    return "127.0.0.2"


def test_somebody_listens(own: str) -> None:
    with ExitStack() as stack:
        port = stack.enter_context(listener("127.0.0.1")).getsockname()[1]
        for address in (f"127.0.0.1:{port}", f"localhost:{port}"):
            check_listening(address)
            assert only_on_loopback(address)
        everywhere = stack.enter_context(listener("0.0.0.0")).getsockname()[1]
        assert not only_on_loopback(f"127.0.0.1:{everywhere}")
        elsewhere = stack.enter_context(listener(own)).getsockname()[1]
        check_listening(f"127.0.0.1:{elsewhere}")
        assert not only_on_loopback(f"127.0.0.1:{elsewhere}"), "where Ray looks for it"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "127.0.0.1:99999999", f"{'a' * 70}:1"])
def test_nobody_listens(address: str, own: str) -> None:
    del own
    with pytest.raises(InputError, match=re.escape(f"--address {address}: no Ray cluster can be joined there (")):
        check_listening(address)
    assert not only_on_loopback(address)


@pytest.mark.parametrize("address", ["auto", "local", "nonsense", "host:", ":6379", "host:x"])
def test_what_is_left_to_ray(address: str) -> None:
    check_listening(address)
    assert not only_on_loopback(address)


def test_addresses_of_this_machine(own: str) -> None:
    assert all(is_this_machine(f"{host}:6379") for host in ("127.0.0.1", "localhost", "[::1]", own))
    assert not any(is_this_machine(address) for address in ("192.0.2.9:6379", "auto", "head:6379", own))


def test_the_token_is_sent_to_a_cluster_of_this_machine_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path)})
    environment.prepare(local=False, token=True)
    assert "RAY_AUTH_MODE" not in os.environ, "there is none"
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").touch()
    environment.prepare(local=False)
    assert "RAY_AUTH_MODE" not in os.environ
    environment.prepare(local=False, token=True)
    assert os.environ["RAY_AUTH_MODE"] == "token"


@pytest.mark.parametrize(
    ("given", "variable", "address"),
    [
        (None, None, None),
        (None, "", None),
        (None, "local", None),
        (None, "10.0.0.1:6379", "10.0.0.1:6379"),
        (None, "auto", "auto"),
        (None, "http://127.0.0.1:8265", None),
        (None, "https://ray.example.org", None),
        ("auto", "10.0.0.1:6379", "auto"),
        ("local", "10.0.0.1:6379", None),
        ("10.0.0.2:6379", "http://127.0.0.1:8265", "10.0.0.2:6379"),
    ],
)
def test_the_cluster_that_is_joined(
    monkeypatch: pytest.MonkeyPatch, given: str | None, variable: str | None, address: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {} if variable is None else {"RAY_ADDRESS": variable})
    assert environment.cluster_address(given) == address


def test_ray_client_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"RAY_ADDRESS": "ray://head:10001"})
    with pytest.raises(InputError, match="RAY_ADDRESS=ray://head:10001: Ray Client is not supported; run the sweep on"):
        environment.cluster_address(None)
    assert environment.cluster_address("auto") == "auto"
