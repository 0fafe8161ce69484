"""Variables that Ray and Tune read from the environment, most of them at import. Imports neither."""

import os
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
