"""What a validity gate means, in a plain paragraph for whoever finds it failed. Checks nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.analysis.gates import Finding

MEANING = {
    "replay": (
        "The counters say that layers ran which the policy wanted left out, or were left out at k=1. The "
        "times then say nothing about reuse, and the answers are not those of the policy named. This is a "
        "fault of the program, not of the machine: rows made before it is repaired cannot be used."
    ),
    "agreement at k=1": (
        "All configurations at k=1 are the same computation. If their answers differ on the same type of "
        "device, something besides the policy changes results: a cache that outlives its document, a batch "
        "that leaks into another, arithmetic that is not repeatable. Differences of other configurations may "
        "have the same cause."
    ),
    "output mode": (
        "In output mode no layer runs in a replaying pass, so the layers a policy names cannot matter. If "
        "they seem to, something besides the policy changes results, as above."
    ),
    "one version": (
        "Rows of different code or of different weights are not one experiment: a difference between two "
        "configurations may be the difference between two versions. Run the older trials again, or report "
        "them apart."
    ),
    "settings": (
        "Rows ran with settings other than those asked for, or do not say with which. A difference between "
        "two configurations may then be one of threshold, precision, batch size or device."
    ),
    "output length": (
        "Tokens per second rewards repetition: a configuration that writes more, or runs to the length limit "
        "more often, looks faster without being so. Read its seconds per document, which count every token it "
        "took to come to an answer."
    ),
    "every document once": (
        "Pairs are made of the documents both sides have. Where some are missing, configurations are compared "
        "on fewer documents than were asked for, and not all on the same ones; continue the sweep to fill "
        "them in."
    ),
    "cold start": (
        "An actor's first trial ran unlike its later ones, as without a warm-up. If it holds many of a "
        "configuration's documents, that configuration looks slower (or, where the calibration was the cold "
        "part, faster) than it is."
    ),
    "own device": (
        "Actors that share a GPU slow each other down, and by how much depends on what the neighbour runs at the "
        "moment. A configuration may look faster because its neighbours were idle. Accuracies are not affected; for "
        "speeds, run the sweep with one actor on each GPU (--gpus-per-actor 1)."
    ),
    "metrics": ("Rows without a finite score or time cannot enter any mean."),
}
OK, WARNING, FAILED = "held", "warning", "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class GateText:
    name: str
    state: str
    sentences: tuple[str, ...]
    meaning: str  # empty where it held


def gate_texts(findings: Sequence[Finding]) -> Iterator[GateText]:
    """One for each gate, failed ones first."""
    by_gate: dict[str, list[Finding]] = {}
    for finding in findings:
        by_gate.setdefault(finding.gate, []).append(finding)
    texts = [_text(name, found) for name, found in by_gate.items()]
    yield from sorted(texts, key=lambda text: (FAILED, WARNING, OK).index(text.state))


def _text(name: str, found: Sequence[Finding]) -> GateText:
    failed = [finding for finding in found if not finding.ok]
    state = OK if not failed else FAILED if any(finding.withholds for finding in failed) else WARNING
    said = tuple(finding.sentence for finding in (failed or found))
    return GateText(name=name, state=state, sentences=said, meaning=MEANING.get(name, "") if failed else "")
