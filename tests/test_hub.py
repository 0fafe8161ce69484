"""Retries against a real HTTP server that speaks the Hub's API and fails in every way the Hub does."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from fake_hub import COMMIT, HANG, RESET, Answer, FakeHub
from qwen2_folders import qwen2, tensors, write_model
from test_tasks_sources import gsm8k_folder

import sampler.hub
from sampler import InputError
from sampler.hub import BUDGET_SECONDS, RETRY_AFTER_BUDGET_SECONDS, hub_problem
from sampler.loading import find_model
from tasks.sources import Hub

ROOT = Path(__file__).parents[1]
INFO, TREE, FILE = "GET /api/models/owner/name", "GET /api/models/owner/name/tree", "/owner/name/resolve/"
BUSY, BROKEN = Answer(status=429), Answer(status=503)


class FakeClock:
    """Only sleeping takes time."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float, /) -> None:
        self.now += seconds
        self.slept.append(seconds)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hub")
    model = write_model(root / "model", tensors(qwen2()))
    return {"models/owner/name": model, "datasets/openai/gsm8k": gsm8k_folder(root / "data", suffix="parquet")}


@pytest.fixture
def hub(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """As if HF_ENDPOINT and HF_HOME had been set before huggingface_hub was imported."""
    constants = huggingface_hub.constants
    with FakeHub(folders).serving() as fake_hub:
        monkeypatch.setattr(constants, "ENDPOINT", fake_hub.address)
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", fake_hub.address)
        template = fake_hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.chdir(tmp_path)
        yield fake_hub
        huggingface_hub.close_session()  # its connections lead to a server that is gone


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def given_up(clock: FakeClock, source: str = "owner/name") -> str:
    with pytest.raises(InputError) as caught:
        find_model(source, clock=clock)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_working_hub_gets_one_request(hub: FakeHub, clock: FakeClock) -> None:
    found = find_model("owner/name", clock=clock)
    assert (found.revision, found.config.num_layers) == (COMMIT, 2)
    assert not clock.slept
    assert hub.count(f"GET {FILE}") == 2


@pytest.mark.parametrize("where", [INFO, TREE, f"HEAD {FILE}", f"GET {FILE}"])
@pytest.mark.parametrize("answer", [BUSY, BROKEN, Answer(status=500), Answer(status=408), RESET], ids=repr)
def test_a_failure_at_any_request_is_retried(hub: FakeHub, clock: FakeClock, where: str, answer: Answer) -> None:
    hub.fail(where, answer, answer)
    assert find_model("owner/name", clock=clock).revision == COMMIT
    assert 1 <= len(clock.slept) <= 2  # two files may fail in the same try
    assert all(0.5 <= pause <= 2 for pause in clock.slept)


def test_a_request_that_hangs_is_retried(hub: FakeHub, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler.hub, "REQUEST_TIMEOUT_SECONDS", 2.0)
    monkeypatch.setattr(sampler.loading, "REQUEST_TIMEOUT_SECONDS", 2.0)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_ETAG_TIMEOUT", 2)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DOWNLOAD_TIMEOUT", 2)
    hub.fail(INFO, HANG)
    hub.fail(TREE, HANG)  # has no timeout in huggingface_hub
    assert find_model("owner/name", clock=clock).revision == COMMIT
    assert hub.count(TREE) >= 2


def test_retry_after_in_seconds(hub: FakeHub, clock: FakeClock) -> None:
    hub.fail(INFO, Answer(status=429, headers={"Retry-After": "7"}), Answer(status=503, headers={"Retry-After": "40"}))
    find_model("owner/name", clock=clock)
    assert [7 <= clock.slept[0] <= 9, 40 <= clock.slept[1] <= 42] == [True, True]


def test_retry_after_as_a_date_counts_from_the_hubs_clock(hub: FakeHub, clock: FakeClock) -> None:
    there = datetime(2020, 1, 1, tzinfo=UTC)  # whatever the time is here
    dates = {"Date": format_datetime(there, usegmt=True), "Retry-After": format_datetime(there + timedelta(seconds=20))}
    hub.fail(INFO, Answer(status=429, headers=dates))
    find_model("owner/name", clock=clock)
    assert len(clock.slept) == 1
    assert 20 <= clock.slept[0] <= 22


def test_the_rate_limit_header_counts_only_when_nothing_is_left(hub: FakeHub, clock: FakeClock) -> None:
    hub.fail(INFO, Answer(status=429, headers={"RateLimit": '"api";r=0;t=33'}))
    hub.fail(INFO, Answer(status=503, headers={"RateLimit": '"api";r=17;t=33'}))
    find_model("owner/name", clock=clock)
    assert 33 <= clock.slept[0] <= 35
    assert clock.slept[1] <= 1


def test_a_permanent_rate_limit_ends_the_call_in_time(hub: FakeHub, clock: FakeClock) -> None:
    hub.fail(INFO, *[BUSY] * 50)
    sentence = given_up(clock)
    tries = hub.count(INFO)
    assert sentence == (
        "model 'owner/name' cannot be downloaded: the Hub answered 429 Too Many Requests for 30 s; "
        "try again later or use a local directory"
    )
    assert clock.now == pytest.approx(BUDGET_SECONDS)
    assert tries == len(clock.slept) + 1
    assert 5 <= tries <= 10


def test_retry_after_is_bounded(hub: FakeHub, clock: FakeClock) -> None:
    hub.fail(INFO, *[Answer(status=429, headers={"Retry-After": "86400"})] * 50)
    assert "429 Too Many Requests for 120 s" in given_up(clock)
    assert clock.now == pytest.approx(RETRY_AFTER_BUDGET_SECONDS)
    assert max(clock.slept) <= 62


def test_a_download_that_gives_up_names_the_servers_answer(hub: FakeHub, clock: FakeClock) -> None:
    hub.fail(TREE, *[BROKEN] * 50)
    assert "the Hub answered 503 Service Unavailable" in given_up(clock)
    assert hub.count(TREE) == len(clock.slept) + 1, "huggingface_hub's own retries do not multiply ours"
    assert clock.now == pytest.approx(BUDGET_SECONDS)


def test_connections_that_are_always_reset(hub: FakeHub, clock: FakeClock) -> None:
    hub.fail(INFO, *[RESET] * 50)
    assert "the Hub reset connections for 30 s" in given_up(clock)


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        (Answer(status=404, headers={"X-Error-Code": "RepoNotFound"}), "nor a Hub repository that you can read"),
        (Answer(status=404, headers={"X-Error-Code": "RevisionNotFound"}), "revision that does not exist on the Hub"),
        (Answer(status=403, headers={"X-Error-Code": "GatedRepo"}), "gated: accept its terms"),
        (Answer(status=401, headers={"X-Error-Message": "Invalid credentials in Authorization header"}), "HF_TOKEN"),
        (Answer(status=403), "the Hub answered 403; check the token in HF_TOKEN"),
    ],
)
def test_permission_errors_are_not_retried(hub: FakeHub, clock: FakeClock, answer: Answer, part: str) -> None:
    hub.fail(INFO, answer)
    assert part in given_up(clock)
    assert not clock.slept
    assert hub.count(INFO) == 1


@pytest.mark.usefixtures("hub")
def test_an_unreachable_hub_is_not_retried(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("http://127.0.0.1:9", "http://no-such-host.invalid"):  # refused, and no such name
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", address)
        assert "is not a local directory, and the Hub cannot be reached" in given_up(clock)
    assert not clock.slept


@pytest.mark.parametrize("where", [INFO, f"{INFO}/revision/main"])  # of model_info, and of snapshot_download
def test_an_earlier_download_is_used_while_the_hub_is_busy(hub: FakeHub, clock: FakeClock, where: str) -> None:
    first = find_model("owner/name", clock=clock)
    hub.fail(where, *[BUSY] * 50)
    assert find_model("owner/name", clock=clock).folder == first.folder
    assert clock.now == pytest.approx(BUDGET_SECONDS)


# The disk that downloads go to

FIND = """
from sampler import InputError
from sampler.loading import find_model
try:
    print(find_model("owner/name").revision)
except InputError as error:
    print(error)
"""


def find_in_a_process(hub: FakeHub, cache: Path, mount: str) -> str:
    """What find_model returns or raises, with a file system of its own mounted at `cache`."""
    namespaces = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*namespaces, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mount namespaces are not available")
    cache.mkdir()
    command = f"mount -t tmpfs -o {mount} tmpfs {cache} && exec {sys.executable} -W ignore -c '{FIND}'"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = {**kept, "PYTHONPATH": str(ROOT), "HF_ENDPOINT": hub.address, "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_HOME": str(cache), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(
        [*namespaces, "sh", "-c", command],
        env=environment,
        cwd=cache.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("mount", "part"), [("size=40k", "No space left on device"), ("ro", "Read-only file system"), ("size=8m", "")]
)
def test_a_disk_that_cannot_be_written(hub: FakeHub, tmp_path: Path, mount: str, part: str) -> None:
    hub.fail(INFO, Answer(status=429, headers={"Retry-After": "0"}))
    cache = tmp_path / "small"
    output = find_in_a_process(hub, cache, mount)
    if part:
        assert f"cannot be downloaded: the Hub cache {cache}/hub cannot be written ({part})" in output
        assert "set HF_HOME to another directory" in output
    else:
        assert output == COMMIT


def test_xet_reports_a_full_disk_in_words() -> None:
    error = RuntimeError("Data processing error: CAS service error : IO Error: No space left on device (os error 28)")
    assert f"cannot be written ({os.strerror(errno.ENOSPC)})" in hub_problem(error)
    assert "cannot be written" not in hub_problem(RuntimeError("Data processing error: CAS service error"))


# Documents


def no_check(row: Mapping[str, Any]) -> None:
    del row


@pytest.mark.parametrize("where", ["GET /api/datasets/", "HEAD /datasets/", "GET /datasets/"])
@pytest.mark.parametrize("answer", [BUSY, BROKEN, RESET], ids=repr)
def test_documents_are_retried_too(hub: FakeHub, clock: FakeClock, where: str, answer: Answer) -> None:
    hub.fail(where, answer, answer)
    found = Hub(clock=clock).load("openai/gsm8k", "main", ["test"], no_check)
    assert len(found["test"]) == 6
    assert len(clock.slept) == 2


def test_documents_that_a_busy_hub_does_not_give(hub: FakeHub, clock: FakeClock) -> None:
    source = Hub(clock=clock)
    hub.fail("GET /api/datasets/", *[BUSY] * 50)
    with pytest.raises(InputError, match="not in the Hub cache, and the Hub answered 429 Too Many Requests for"):
        source.check("openai/gsm8k", gated=False)
    assert clock.now == pytest.approx(BUDGET_SECONDS)
