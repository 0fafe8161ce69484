"""Numbers as people read them, the same in page, Markdown and figures. Computes nothing."""

import math

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
