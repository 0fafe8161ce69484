"""Every second of every actor is accounted for once."""

from datetime import UTC, datetime
from typing import Any

import pytest

from orchestrator.progress.progress import PARTS, timeline

T0 = datetime(2026, 1, 1, tzinfo=UTC).timestamp()


def attempt(actor: str, start: float, end: float, **fields: float) -> dict[str, Any]:
    """Calibrates for 1 s, decodes, scores for 0.5 s, waits for 0.25 s, and is finished in another 0.25 s."""
    return {
        "actor": actor,
        "started_at": datetime.fromtimestamp(T0 + start + 1, UTC).isoformat(),
        "ended_at": datetime.fromtimestamp(T0 + end, UTC).isoformat(),
        "calibration_seconds": 1.0,
        "preparing_seconds": 1.0,
        "waiting_seconds": 0.25,
        "decode_seconds": end - start - 2.0,
        "seconds": end - start - 0.25,
        "load_seconds": 3.0,
        "warm_up_seconds": 2.0,
        **fields,
    }


def trials(*attempts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"attempts": [one]} for one in attempts]


def test_the_parts_add_up_to_all_the_time_there_was() -> None:
    found = timeline(
        trials(
            attempt("a", 0, 10),
            attempt("a", 10.5, 20),
            attempt("b", 1, 12),
            attempt("b", 12.25, 18, recalibration_seconds=0.125),
        )
    )
    assert found is not None
    assert (found.trials, found.actors, found.loads, found.load_seconds) == (4, 2, 2, 6.0)
    assert found.seconds == pytest.approx(20)
    assert found.parts == pytest.approx(
        {
            "decoding": 8 + 7.5 + 9 + 3.75,
            "calibration": 4.125,
            "scoring": 1.875,
            "waiting": 1.0,
            "finishing": 1.0,
            "between": 0.75,
            "idle": 1 + 2,
        },
        abs=1e-5,
    )
    assert sum(found.share(part) for part in PARTS) == pytest.approx(1)
    assert found.as_json()["between_trials"]["median"] == pytest.approx(0.375, abs=1e-5)


def test_an_attempt_cut_short_is_a_gap() -> None:
    cut = {"actor": "a", "started_at": datetime.fromtimestamp(T0 + 11, UTC).isoformat(), "reason": "killed"}
    found = timeline([{"attempts": [attempt("a", 0, 10)]}, {"attempts": [cut, attempt("a", 15, 20)]}])
    assert found is not None
    assert found.gaps == pytest.approx((5.0,), abs=1e-5)


def test_nothing_has_ended() -> None:
    assert timeline([]) is None
    assert timeline([{"attempts": []}]) is None
