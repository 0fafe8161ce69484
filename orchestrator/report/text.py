"""Numbers as people read them, the same in page, Markdown and figures. Computes nothing."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.analysis.gates import Finding
from orchestrator.analysis.intervals import Estimate

NONE = "–"


def signed(value: float, places: int = 1) -> str:
    """With its sign, but for what rounds to nothing."""
    if not math.isfinite(value):
        return NONE
    shown = f"{value:+.{places}f}"
    return shown.replace("-", "−") if float(shown) else shown[1:]


def number(value: float | None, places: int = 1) -> str:
    return (
        NONE
        if value is None or not math.isfinite(value)
        else f"{value:,.{places}f}".replace("-", "−").replace(",", " ")
    )


def percent(share: float | None, places: int = 1) -> str:
    return NONE if share is None or not math.isfinite(share) else f"{100 * share:.{places}f} %"


def whole(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ")


def between(estimate: Estimate | None, places: int = 1, scale: float = 1.0, *, sign: bool = False) -> str:
    """The ends of an interval: 71.2 to 75.9."""
    if estimate is None or not all(map(math.isfinite, (estimate.low, estimate.high))):
        return NONE
    show = signed if sign else number
    return f"{show(estimate.low * scale, places)} to {show(estimate.high * scale, places)}"


def p_value(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def hours(seconds: float) -> str:
    """In figures that are not all 0 for a run of minutes."""
    value = seconds / 3600
    return number(value, 2 if value >= 1 else 4)


def duration(seconds: float) -> str:
    """With two units at most: 3 h 12 min."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def size(count: float) -> str:
    """Bytes."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit in ("B", "kB") else f"{value:.1f} {unit}"


def magnitude(value: float | None, unit: str = "FLOP") -> str:
    """With a prefix: 12.3 GFLOP."""
    if value is None or not math.isfinite(value):
        return NONE
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 1000 or prefix == "T":
            break
        value /= 1000
    return f"{value:.3g} {prefix}{unit}"


def large(count: float) -> str:
    """In words: 7.6 billion."""
    for unit, word in ((1e9, "billion"), (1e6, "million")):
        if count >= unit:
            return f"{count / unit:.1f} {word}"
    return whole(count)


def layers(indices: tuple[int, ...]) -> str:
    """Runs of indices joined: 1–12, 20."""
    parts: list[list[int]] = []
    for index in sorted(indices):
        if parts and index == parts[-1][1] + 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in parts) or NONE


def counted(count: int, noun: str) -> str:
    return f"{whole(count)} {noun}{'' if count == 1 else 's'}"


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
    state = OK if not failed else FAILED if any(finding.withholds_verdict for finding in failed) else WARNING
    said = tuple(finding.sentence for finding in (failed or found))
    return GateText(name=name, state=state, sentences=said, meaning=MEANING.get(name, "") if failed else "")
