"""Which cluster a sweep joins, and that an address without a cluster is detected without waiting."""

import os
import re
import shutil
import socket
import stat
import subprocess
import tempfile
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


def test_an_open_port_is_detected(own: str) -> None:
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
def test_a_closed_port_is_detected(address: str, own: str) -> None:
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


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl on this machine")
def test_the_documented_certificates_can_be_made(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "security.md").read_text(encoding="utf-8")
    (commands,) = (block for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if "openssl" in block)
    script = f"set -e\n{commands}\nopenssl verify -CAfile ca.crt -verify_ip 10.0.0.1 node.crt"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "node.crt: OK"


def test_a_new_token_is_private_and_an_old_one_becomes_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path)})
    token = tmp_path / ".ray" / "auth_token"
    notes: list[str] = []
    before = os.umask(0)
    try:
        environment.private_token(notes.append)
    finally:
        os.umask(before)
    value = token.read_text()
    assert len(value) == 64
    assert (modes(token), notes) == ((0o700, 0o600), [])
    token.chmod(0o664)
    token.parent.chmod(0o777)
    environment.private_token(notes.append)
    assert (modes(token), token.read_text()) == ((0o755, 0o600), value)
    assert [note.partition(" and is private now")[0] for note in notes] == [
        f"warning: {token} was accessible to other users of this machine"
    ]
    environment.private_token(notes.append)
    assert len(notes) == 1


@pytest.mark.parametrize("variables", [{"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "abc"}])
def test_no_token_file_is_made_where_none_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path), **variables})
    environment.private_token(pytest.fail)
    assert list(tmp_path.iterdir()) == []


def modes(token: Path) -> tuple[int, int]:
    return stat.S_IMODE(token.parent.stat().st_mode), stat.S_IMODE(token.stat().st_mode)


def test_private_directories(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    inner.chmod(0o777)
    inner.parent.chmod(0o700)
    assert environment.is_private(inner), "other users cannot enter it"
    with tempfile.TemporaryDirectory(
        dir="/tmp"
    ) as top:  # everybody may write to /tmp itself, but it has the sticky bit
        reachable = Path(top) / "session"
        reachable.mkdir()
        reachable.chmod(0o777)
        assert environment.is_private(reachable)
        Path(top).chmod(0o755)
        assert not environment.is_private(reachable)
        reachable.chmod(0o755)
        assert environment.is_private(reachable)
        Path(top).chmod(0o777)
        assert not environment.is_private(reachable), "it can be replaced"


def test_sockets_fit_into_the_longest_directory() -> None:
    private = "/" + "t" * (environment.MAX_TEMPORARY_CHARACTERS - 1) + f"/{environment.PRIVATE_PREFIX}12345678"
    session = "session_2026-01-01_00-00-00_000000_4194304"  # the largest process id of Linux
    assert len(f"{private}/{environment.RAY_DIRECTORY}/{session}/sockets/plasma_store") == 107


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
