"""Whether a program listens at a cluster's address, checked before Ray is imported.

Ray itself would try for minutes, and log each time. It also replaces a loopback address by the machine's own one, so
that a cluster on the loopback device alone (as a sweep's own is) is found only if Ray is restricted to that device too.
"""

import socket

from sampler.errors import InputError

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
