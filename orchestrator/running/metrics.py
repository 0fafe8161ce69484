"""A sweep's totals as gauges that Ray exports for Prometheus; deploy/grafana.json is a dashboard of them."""

from ray.util.metrics import Gauge

from orchestrator.watching.progress import Progress
from orchestrator.watching.tally import Totals

PREFIX = "ray_"  # Ray puts it before every name
TAGS = ("sweep", "task", "policy", "settings")
DONE, WANTED, TRIALS = "reuse_sweep_documents_done", "reuse_sweep_documents_wanted", "reuse_sweep_trials"
ACCURACY, SPEED, SPEEDUP = "reuse_sweep_accuracy", "reuse_sweep_tokens_per_s", "reuse_sweep_speedup"
GAUGES = {  # description and tags
    DONE: ("Documents answered and stored.", TAGS),
    WANTED: ("Documents that the sweep will answer.", TAGS),
    ACCURACY: ("Share of correct answers so far, 0 to 1.", TAGS),
    SPEED: ("Tokens per second of decoding.", TAGS),
    SPEEDUP: ("Calibrated tokens per second relative to k1.", TAGS),
    TRIALS: ("Trials by state: finished, failed, running or pending.", ("sweep", "state")),
}


class SweepMetrics:
    """The gauges of one sweep. Ray exports them as long as the process lives that set them, a Ray worker."""

    def __init__(self, sweep: str) -> None:
        self._sweep = sweep
        self._gauges = {name: Gauge(name, description, tags) for name, (description, tags) in GAUGES.items()}

    def update(self, progress: Progress) -> None:
        for line in progress.totals:
            tags = tags_of(self._sweep, line)
            for name, value in values_of(line).items():
                self._gauges[name].set(value, tags)
        for state, count in trials_by_state(progress).items():
            self._gauges[TRIALS].set(count, {"sweep": self._sweep, "state": state})


def tags_of(sweep: str, line: Totals) -> dict[str, str]:
    """`settings` distinguishes configurations of the same policy."""
    threshold, small_block, block_cache = line.configuration.settings
    settings = f"threshold={threshold:g},small_block={small_block},block_cache={'on' if block_cache else 'off'}"
    return {"sweep": sweep, "task": line.configuration.task, "policy": line.configuration.policy, "settings": settings}


def values_of(line: Totals) -> dict[str, float]:
    """What is known so far: a configuration without answers has no accuracy."""
    values = {
        DONE: line.documents,
        WANTED: line.wanted,
        ACCURACY: line.accuracy,
        SPEED: line.tokens_per_s,
        SPEEDUP: line.speedup,
    }
    return {name: value for name, value in values.items() if value is not None}


def trials_by_state(progress: Progress) -> dict[str, int]:
    """Adds up to all trials of the sweep."""
    known = {"finished": progress.finished, "failed": progress.failed, "running": len(progress.running)}
    return {**known, "pending": max(0, progress.trials - sum(known.values()))}
