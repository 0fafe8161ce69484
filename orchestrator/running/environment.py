"""Variables that Ray and Tune read from the environment, most of them at import. Imports neither."""

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

from sampler.errors import InputError

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is reported to anyone
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # under `uv run` workers would start in a copy of the folder
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's own future default, and it warns until it is set
    # Of what Ray's own processes say on the terminal (nodes that died, how many processes there are) only memory
    # matters: the rest is told in our own words.
    "RAY_DEDUP_LOGS": "1",
    "RAY_DEDUP_LOGS_SKIP_REGEX": r"(?s)^(?!.*(memory pressure|low on memory))",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # answers that came too late; whoever waits for one hears its error himself
    "RAY_worker_niceness": "0",  # Ray's 15 would let everything else on the machine go first, and be measured
}
TUNE = {
    "RAY_AIR_NEW_OUTPUT": "0",  # whose table of the configuration no verbosity silences
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # an interrupt ends the sweep, not only Tune
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",  # they are told in one sentence each
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",  # Tune's own state is never read
    "TUNE_WARN_THRESHOLD_S": "5",
    "TUNE_MAX_LEN_IDENTIFIER": "64",
}
OBJECT_STORE = 160 * 2**20  # bytes: rows are small, and weights never pass through Ray
LONGEST_TEMPORARY = 40  # characters: Ray puts sockets into it, whose names may have 107 in all
# Ray's switch for laptops: every process of the cluster then binds to the loopback device alone.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
TOKEN = {"RAY_AUTH_MODE": "token"}


def prepare(*, local: bool, token: bool = False) -> None:
    """To be called before Ray is imported. Variables that are set stay as they are, but for LOOPBACK.

    `token`: the cluster is on this machine. `ray start` makes it ask for this user's token where there is one, but Ray
    sends it to the address `auto` only. To clusters elsewhere it is sent if RAY_AUTH_MODE says so.
    """
    sends_token = token and (Path.home() / ".ray" / "auth_token").is_file()
    for name, value in (QUIET | TUNE | (TOKEN if sends_token else {})).items():
        os.environ.setdefault(name, value)
    if local:
        os.environ.update(LOOPBACK)


def cluster_address(given: str | None) -> str | None:
    """The cluster to join: --address, else Ray's own RAY_ADDRESS, which every `ray job` has; None for a new one here.

    `local` is a new one too. RAY_ADDRESS may also be a dashboard's URL, for `ray job submit`: no sweep can join that.
    """
    address = given or os.environ.get("RAY_ADDRESS") or "local"
    if given is None and address.startswith(("http://", "https://")):
        return None
    if given is None and address.startswith("ray://"):
        raise InputError(
            f"RAY_ADDRESS={address}: Ray Client is not supported; run the sweep on the cluster with `ray job submit`, "
            "or give the address of its head, such as --address HOST:6379"
        )
    return None if address == "local" else address


NAMES = ("HF_TOKEN",)


@dataclass(frozen=True, slots=True)
class Access:
    """Variables by name, without those that are not set."""

    variables: dict[str, str] = field(repr=False)

    @classmethod
    def of_this_process(cls) -> "Access":
        return cls({name: os.environ[name] for name in NAMES if os.environ.get(name)})

    def grant(self) -> None:
        """To this process; what the node has of its own stays where the command had nothing."""
        os.environ.update(self.variables)


CONNECT_TIMEOUT_SECONDS = 5.0
ELSEWHERE = ("192.0.2.1", 9)  # a reserved address; nothing is sent: the kernel picks the own address it would use


def check_listening(address: str) -> None:
    """An InputError where none does; `auto` and what is not HOST:PORT is left to Ray."""
    place = _place(address)
    if place is None:
        return
    reasons = [_refusal(host, place[1]) for host in _hosts(place[0])]
    if None not in reasons:
        raise InputError(f"--address {address}: no Ray cluster can be joined there ({reasons[0]})")


def is_this_machine(address: str) -> bool:
    """Whether the address is one of this machine's; what is not HOST:PORT is not."""
    place = _place(address)
    return place is not None and (_is_loopback(place[0]) or place[0] == _own_address())


def only_on_loopback(address: str) -> bool:
    place = _place(address)
    if place is None or not _is_loopback(place[0]):
        return False
    here, own = (_refusal(host, place[1]) for host in _hosts(place[0]))
    return here is None and own is not None


def _place(address: str) -> tuple[str, int] | None:
    host, _, port = address.rpartition("://")[2].rpartition(":")
    return (host.strip("[]"), int(port)) if host and port.isdecimal() else None


def _hosts(host: str) -> tuple[str, ...]:
    return (host, _own_address()) if _is_loopback(host) else (host,)


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(ELSEWHERE)
        except OSError:  # no network
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _refusal(host: str, port: int) -> str | None:
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_SECONDS).close()
    except (OSError, OverflowError, UnicodeError) as error:  # also a port or a name that cannot be
        return getattr(error, "strerror", None) or str(error)
    return None
