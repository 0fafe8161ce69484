"""A sweep's totals as gauges of Ray's metrics, for whoever scrapes them. Knows no rows and no files."""

from collections.abc import Iterable

from ray.util.metrics import Gauge

from orchestrator.watching.tally import Totals

TAGS = ("sweep", "task", "policy", "settings")


class SweepMetrics:
    """Gauges by task and policy; `settings` tells configurations of the same policy apart. Lives in a Ray process."""

    def __init__(self, sweep: str) -> None:
        self._sweep = sweep
        self._documents = Gauge("reuse_sweep_documents_done", "Documents answered and stored.", TAGS)
        self._accuracy = Gauge("reuse_sweep_accuracy", "Share of right answers so far, 0 to 1.", TAGS)
        self._speed = Gauge("reuse_sweep_tokens_per_s", "Tokens by wall time of their batches.", TAGS)

    def update(self, totals: Iterable[Totals]) -> None:
        for line in totals:
            tags = tags_of(self._sweep, line)
            self._documents.set(line.documents, tags)
            if line.accuracy is not None:
                self._accuracy.set(line.accuracy, tags)
            if line.tokens_per_s is not None:
                self._speed.set(line.tokens_per_s, tags)


def tags_of(sweep: str, line: Totals) -> dict[str, str]:
    threshold, small_block, block_cache = line.configuration.settings
    settings = f"threshold={threshold:g},small_block={small_block},block_cache={'on' if block_cache else 'off'}"
    return {"sweep": sweep, "task": line.configuration.task, "policy": line.configuration.policy, "settings": settings}
