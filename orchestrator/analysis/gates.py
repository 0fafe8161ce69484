"""Validity gates: what must hold before the figures of a table may be compared, and the sentence if it does."""

from collections.abc import Callable, Iterator

from orchestrator.analysis.findings import Evidence, Finding
from orchestrator.analysis.gates_answers import baseline_agreement, length, output_mode, replay
from orchestrator.analysis.gates_rows import cold_start, every_document, metrics, one_version, own_device, settings

Gate = Callable[[Evidence], Iterator[Finding]]
GATES: dict[str, tuple[Gate, str]] = {
    "replay": (replay, "Layers were replayed in every pass that was to replay, and never at k=1."),
    "agreement at k=1": (baseline_agreement, "All runs at k=1 gave the same answers on the same type of device."),
    "output mode": (output_mode, "Output mode gave the same answers for every subset of layers, or was not used."),
    "one version": (one_version, "One version of the code and one revision of the model made all rows."),
    "settings": (settings, "Effective threshold, dtype, batch size and device are recorded and as asked for."),
    "output length": (length, "Output lengths are those of k=1."),
    "every document once": (every_document, "Every run has every document exactly once."),
    "cold start": (cold_start, "No actor's first trial was off its calibrated peers."),
    "own device": (own_device, "No two actors shared a GPU."),
    "metrics": (metrics, "Every row has a finite score, time and calibration."),
}


def check(evidence: Evidence) -> tuple[Finding, ...]:
    """All gates; one that finds nothing says what held."""
    result: list[Finding] = []
    for name, (gate, held) in GATES.items():
        result.extend(list(gate(evidence)) or [Finding(gate=name, ok=True, sentence=held)])
    return tuple(result)
