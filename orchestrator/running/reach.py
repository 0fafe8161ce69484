"""Whether anybody listens at a cluster's address, asked before Ray is imported. Knows no Ray.

Ray itself would try for minutes, and log each time. It also takes a loopback address for the machine's own one, so that
a cluster that is kept to the loopback device (as a sweep's own is) is not found, unless Ray is told to stay there too.
"""

import socket

from sampler.errors import InputError

SECONDS = 5.0
HARMLESS = "/ray.rpc.NodeInfoGcsService/CheckAlive"  # a question that every cluster answers, if it answers at all
ELSEWHERE = ("192.0.2.1", 9)  # nobody has it, nothing is sent: the kernel says which of its own it would use


def check_listening(address: str) -> None:
    """An InputError where nobody does; `auto` and what is no HOST:PORT is left to Ray."""
    place = _place(address)
    if place is None:
        return
    reasons = [_refusal(host, place[1]) for host in _hosts(place[0])]
    if None not in reasons:
        raise InputError(f"--address {address}: no Ray cluster can be joined there ({reasons[0]})")


def asks_for_token(address: str) -> bool:
    """Whether it is a cluster of this machine that wants this user's token; one elsewhere is not asked or shown one.

    `ray start` makes such clusters wherever there is a token, and Ray shows it where the address is auto, nowhere else.
    To a cluster that wants none it must not be shown: then this process would want one from the cluster, in vain.
    """
    place = _place(address)
    if place is None or not (_is_loopback(place[0]) or place[0] == _own_address()):
        return False
    return any(_is_locked(host, place[1]) for host in _hosts(place[0]))


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
        socket.create_connection((host, port), timeout=SECONDS).close()
    except (OSError, OverflowError, UnicodeError) as error:  # also a port or a name that cannot be
        return getattr(error, "strerror", None) or str(error)
    return None


def _is_locked(host: str, port: int) -> bool:
    import grpc  # only now: most sweeps join nothing

    with grpc.insecure_channel(f"[{host}]:{port}" if ":" in host else f"{host}:{port}") as channel:
        try:
            channel.unary_unary(HARMLESS)(b"", timeout=SECONDS)
        except grpc.RpcError as error:
            return bool(error.code() is grpc.StatusCode.UNAUTHENTICATED)
    return False
