"""Calls to the Hugging Face Hub: retries with one time budget, and a phrase for each way a call can fail.

huggingface_hub retries some requests itself and others not at all. Where it retries, it sleeps as long as the Hub's
Retry-After header demands, and some requests have no timeout. Inside `retry_hub` a failed request raises an error that
the library does not retry, so that only the loop here decides how long to wait. To do this, `send` of the current
client is wrapped for the duration of a call. huggingface_hub.set_client_factory would replace a client that the user
configured, such as one with a proxy, and there is no way to get that one back.
"""

import importlib
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any, Protocol, TypeVar

from huggingface_hub import constants, get_session
from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]

REQUEST_TIMEOUT_SECONDS = 10.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 8.0
BUDGET_SECONDS = 30.0  # of one call, if the Hub does not say when to try again
LONGEST_RETRY_AFTER_SECONDS, RETRY_AFTER_BUDGET_SECONDS = 60.0, 120.0  # of one pause and of one call, if it does
RETRY_AFTER_JITTER_SECONDS = 2.0  # so that the workers of a sweep do not all retry at the same moment

UNREACHABLE = "the Hub cannot be reached"
RATE_LIMIT = re.compile(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d+)")  # RateLimit: "api";r=0;t=55
XET_OS_ERROR = re.compile(r"\(os error (\d+)\)")

T = TypeVar("T")
httpx: Any = importlib.import_module(HTTPError.__module__.partition(".")[0])  # httpx, or httpx2 in huggingface_hub 2
logger = logging.getLogger(__name__)
_client_lock = threading.RLock()


class Clock(Protocol):
    """The functions of the module `time` that are used here; tests pass a fake."""

    def monotonic(self) -> float: ...
    def sleep(self, seconds: float, /) -> None: ...


class HubBusy(Exception):
    """The Hub failed to answer but may answer soon. Not an HTTPError or OSError, which huggingface_hub would catch."""

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.reason, self.retry_after = reason, retry_after


class HubUnreachable(ConnectionError):
    """No network, unknown host, or connection refused."""


class HubGaveUp(ConnectionError):
    """The Hub was busy for longer than a call may take."""


def retry_hub(call: Callable[[], T], *, clock: Clock = time) -> T:
    """Repeats a call while the Hub answers 429 or 5xx, times out or drops connections; finally raises HubGaveUp.

    All other errors are raised at once: not found, no permission, and a Hub that cannot be reached at all, because a
    machine without a network should not wait. Time spent downloading does not count against the budget.
    """
    spent, budget, back_off = 0.0, BUDGET_SECONDS, FIRST_PAUSE_SECONDS
    while True:
        began = clock.monotonic()
        try:
            with _requests_tried_once():
                return call()
        except (HubBusy, HTTPError, OSError) as error:
            busy = _as_busy(error)
            if busy is None:
                raise
        spent += min(clock.monotonic() - began, REQUEST_TIMEOUT_SECONDS)
        if busy.retry_after is None:
            pause = back_off * random.uniform(0.5, 1.0)
            back_off = min(2 * back_off, LONGEST_PAUSE_SECONDS)
        else:
            budget = RETRY_AFTER_BUDGET_SECONDS
            pause = min(busy.retry_after, LONGEST_RETRY_AFTER_SECONDS) + random.uniform(0, RETRY_AFTER_JITTER_SECONDS)
        if spent >= budget:
            raise HubGaveUp(f"the Hub {busy.reason} for {budget:.0f} s")  # the same message on every node
        pause = min(pause, budget - spent)
        logger.warning("the Hub %s; retrying in %.0f s", busy.reason, pause)
        clock.sleep(pause)
        spent += pause


def hub_problem(error: Exception) -> str:
    """Why a call failed, as the end of a sentence. Does not include the error's own text, which may contain a token."""
    number = _os_errno(error)
    if number is not None:
        return (
            f"the Hub cache {constants.HF_HUB_CACHE} cannot be written ({os.strerror(number)}); "
            "free some space or set HF_HOME to another directory"
        )
    if isinstance(error, HubGaveUp):
        return str(error)
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        return f"the Hub answered {status}" + ("; check the token in HF_TOKEN" if status in (401, 403) else "")
    if isinstance(error, RuntimeError):
        return "the Hub's storage service (Xet) failed"
    return UNREACHABLE


def _os_errno(error: Exception) -> int | None:
    """The errno of a file system error. Xet downloads report it in the text of a RuntimeError."""
    if isinstance(error, RuntimeError):
        match = XET_OS_ERROR.search(str(error))
        return int(match[1]) if match else None
    if isinstance(error, OSError) and not isinstance(error, ConnectionError | TimeoutError | HTTPError):
        return error.errno
    return None


def _as_busy(error: BaseException | None) -> HubBusy | None:
    """A HubBusy if the error, or one in its chain of causes, is worth a retry."""
    while error is not None:
        if isinstance(error, HubBusy):
            return error
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return None
        if isinstance(error, httpx.TimeoutException):
            return HubBusy("did not answer")
        if isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError):
            return HubBusy("reset connections")
        error = error.__cause__
    return None


@contextmanager
def _requests_tried_once() -> Iterator[None]:
    """Gives each request of huggingface_hub a timeout, and lets failed ones raise errors that it does not retry."""
    with _client_lock:
        client: Any = get_session()
        send = client.send

        def send_once(request: Any, **options: Any) -> Any:
            _limit_timeout(request)
            try:
                response = send(request, **options)
            except httpx.TransportError as error:
                raise _as_busy(error) or HubUnreachable(UNREACHABLE) from error
            _raise_if_busy(response)
            return response

        client.send = send_once
        try:
            yield
        finally:
            client.send = send


def _limit_timeout(request: Any) -> None:
    """The limit is REQUEST_TIMEOUT_SECONDS, or longer if the user configured huggingface_hub so."""
    longest = max(REQUEST_TIMEOUT_SECONDS, constants.HF_HUB_ETAG_TIMEOUT, constants.HF_HUB_DOWNLOAD_TIMEOUT)
    limits = request.extensions.get("timeout") or {}
    names = ("connect", "read", "write", "pool")
    request.extensions["timeout"] = {name: min(limits.get(name) or longest, longest) for name in names}


def _raise_if_busy(response: Any) -> None:
    status = response.status_code
    if status in (408, 429) or status >= 500:
        response.close()
        raise HubBusy(f"answered {status} {response.reason_phrase}".rstrip(), _retry_after(response.headers))


def _retry_after(headers: Any) -> float | None:
    """Seconds to wait before the next request, from Retry-After (a number or a date) or from RateLimit."""
    value = headers.get("retry-after", "").strip()
    if value.isdecimal():
        return float(value)
    at = _timestamp(value)
    if at is not None:
        now = _timestamp(headers.get("date", ""))  # the Hub's clock: this machine's may be wrong
        return max(0.0, at - (time.time() if now is None else now))
    match = RATE_LIMIT.search(headers.get("ratelimit", ""))
    return float(match[1]) if match else None


def _timestamp(http_date: str) -> float | None:
    try:
        return parsedate_to_datetime(http_date).timestamp()
    except ValueError:
        return None
