"""Prepares this process for Ray: environment variables, the cluster's address, access tokens. Does not import Ray.

Ray reads most of its variables when it is imported, so `prepare` comes first.
"""

import os
import secrets
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from sampler.errors import InputError

RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # under `uv run` workers would start in a copy of the directory
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's future default; Ray prints a warning unless it is set
    # Of the lines that Ray's processes print to the terminal, only those about memory are shown. The sweep reports
    # other events, such as dead nodes, itself.
    "RAY_DEDUP_LOGS": "1",
    "RAY_DEDUP_LOGS_SKIP_REGEX": r"(?s)^(?!.*(memory pressure|low on memory))",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # of calls that timed out; a caller that waits still gets the error
    "RAY_worker_niceness": "0",  # at Ray's 15, any other process would slow workers down and disturb measurements
}
TUNE_VARIABLES = {
    "RAY_AIR_NEW_OUTPUT": "0",  # prints a table of the configuration at any verbosity
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C stops the sweep, not only Tune
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",  # the sweep prints one sentence for each
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",  # Tune's own state is never read
    "TUNE_WARN_THRESHOLD_S": "5",
    "TUNE_MAX_LEN_IDENTIFIER": "64",
}
# Ray's switch for laptops: all processes of the cluster listen on the loopback device only.
LOOPBACK_VARIABLES = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
OBJECT_STORE_BYTES = 160 * 2**20  # rows are small, and weights never pass through Ray
# Ray makes its directory writable for all users, so it is placed inside a private directory. The paths of its sockets,
# PRIVATE/r/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store, may have up to 107 characters.
RAY_DIRECTORY = "r"
PRIVATE_PREFIX = "reuse-"  # of a new directory for temporary files; 8 random characters follow
MAX_TEMPORARY_CHARACTERS = 107 - len(
    "/reuse-12345678/r/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
)
CONNECT_TIMEOUT_SECONDS = 5.0
RESERVED_ADDRESS = ("192.0.2.1", 9)  # nothing is sent; the kernel chooses the local address that it would send from
ACCESS_VARIABLES = ("HF_TOKEN",)


def prepare(*, local: bool, token: bool = False) -> None:
    """Sets the variables that Ray and Tune read. Existing values are kept, except those that `local` needs.

    `local`: the cluster listens on the loopback device. `token`: the cluster runs on this machine, where `ray start`
    requires the user's token if there is one. By itself, Ray would send the token only to the address `auto`.
    """
    variables = RAY_VARIABLES | TUNE_VARIABLES
    if token and (Path.home() / ".ray" / "auth_token").is_file():
        variables |= {"RAY_AUTH_MODE": "token"}
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    if local:
        os.environ.update(LOOPBACK_VARIABLES)


def private_token(note: Callable[[str], None]) -> None:
    """Ensures that no other user can read or replace the token of a cluster that this process starts.

    Ray itself would create a token that all users can read. `note` receives a warning if an existing one was readable.
    """
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or os.environ.get("RAY_AUTH_TOKEN"):
        return
    path = token_path()
    try:
        if not os.environ.get("RAY_AUTH_TOKEN_PATH"):
            create_token(path)
        _remove_permissions(path.parent, stat.S_IWGRP | stat.S_IWOTH)
        if _remove_permissions(path, stat.S_IRWXG | stat.S_IRWXO):
            note(
                f"warning: {path} was accessible to other users of this machine and is private now; remove it if one "
                "of them may have read it, and Ray creates a new token"
            )
    except OSError as error:
        note(f"warning: Ray's token {path} cannot be made private ({error.strerror}): other users may read it")


def _remove_permissions(path: Path, permissions: int) -> bool:
    """Returns whether the file had any of these permissions."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & permissions:
        path.chmod(mode & ~permissions)
    return bool(mode & permissions)


def token_path() -> Path:
    """The file in which Ray looks for its token, unless RAY_AUTH_TOKEN is set."""
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return Path(named) if named else Path.home() / ".ray" / "auth_token"


def create_token(path: Path) -> None:
    """Writes a token as `ray get-auth-token --generate` does, but with mode 0600. An existing file is kept."""
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
        with suppress(FileExistsError):  # another process was first: its token is used
            os.link(temporary, path)
    finally:
        temporary.unlink()


def is_private(folder: Path) -> bool:
    """Whether only this user and root can write to a directory or replace it."""
    path = folder.resolve()
    for directory in reversed((path, *path.parents)):
        status = directory.stat()
        if status.st_uid not in (0, os.getuid()):
            return False
        if not status.st_mode & (stat.S_IXGRP | stat.S_IXOTH):
            return True  # other users cannot access anything below
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and (directory == path or not status.st_mode & stat.S_ISVTX):
            return False
    return True


def cluster_address(flag: str | None) -> str | None:
    """The cluster to join: `flag` (--address), else RAY_ADDRESS, which every `ray job` has; None to start one here.

    A RAY_ADDRESS that is a dashboard's URL is ignored: it is meant for `ray job submit`, and a sweep cannot join it.
    """
    address = flag or os.environ.get("RAY_ADDRESS") or "local"
    if flag is None and address.startswith(("http://", "https://")):
        return None
    if flag is None and address.startswith("ray://"):
        raise InputError(
            f"RAY_ADDRESS={address}: Ray Client is not supported; run the sweep on the cluster with `ray job submit`, "
            "or give the address of its head, such as --address HOST:6379"
        )
    return None if address == "local" else address


def check_listening(address: str) -> None:
    """Raises an InputError if nothing listens at HOST:PORT; addresses in other forms are not checked.

    Ray itself would retry for minutes and log every attempt.
    """
    host_port = _host_port(address)
    if host_port is None:
        return
    problems = [_connection_problem(host, host_port[1]) for host in _hosts(host_port[0])]
    if None not in problems:
        raise InputError(f"--address {address}: no Ray cluster can be joined there ({problems[0]})")


def is_this_machine(address: str) -> bool:
    """Whether a HOST:PORT is an address of this machine."""
    host_port = _host_port(address)
    return host_port is not None and (_is_loopback(host_port[0]) or host_port[0] == _own_address())


def only_on_loopback(address: str) -> bool:
    """Whether a cluster listens on the loopback device only.

    Ray replaces a loopback address with the machine's own, and finds such a cluster only with LOOPBACK_VARIABLES.
    """
    host_port = _host_port(address)
    if host_port is None or not _is_loopback(host_port[0]):
        return False
    loopback, own = (_connection_problem(host, host_port[1]) for host in _hosts(host_port[0]))
    return loopback is None and own is not None


def _host_port(address: str) -> tuple[str, int] | None:
    host, _, port = address.rpartition("://")[2].rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdecimal() else None


def _hosts(host: str) -> tuple[str, ...]:
    return (host, _own_address()) if _is_loopback(host) else (host,)


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(RESERVED_ADDRESS)
        except OSError:  # no network
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _connection_problem(host: str, port: int) -> str | None:
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_SECONDS).close()
    except (OSError, OverflowError, UnicodeError) as error:  # also an impossible port or host name
        return getattr(error, "strerror", None) or str(error)
    return None


@dataclass(frozen=True, slots=True)
class AccessTokens:
    """Tokens for gated models and data. Created by the driver from its environment, read by every worker.

    They are passed as an argument of each worker, because Ray logs the variables of a runtime environment.
    """

    variables: dict[str, str] = field(repr=False)

    @classmethod
    def from_environment(cls) -> "AccessTokens":
        return cls({name: os.environ[name] for name in ACCESS_VARIABLES if os.environ.get(name)})

    def export(self) -> None:
        """Sets the variables in this process; those that the driver lacks keep the node's values."""
        os.environ.update(self.variables)
