"""Verdicts from interval ends, never from the values between them."""

import pytest

from orchestrator.analysis.accuracy import PairedDifference
from orchestrator.analysis.intervals import Estimate
from orchestrator.analysis.speedups import NoiseFloor, Speedup
from orchestrator.analysis.verdicts import Criteria, Verdict, judge, judge_task, withhold

CRITERIA = Criteria(margin=5.0, speedup=1.2)


def between(low: float, high: float) -> Estimate:
    return Estimate(value=(low + high) / 2, low=low, high=high)


def drop(low: float, high: float, detectable: float = 2.0) -> PairedDifference:
    return PairedDifference(
        documents=500,
        lost=10,
        won=5,
        points=between(-99, 99),  # the interval of one configuration alone decides nothing
        simultaneous=between(low, high),
        p_value=0.5,
        p_holm=0.5,
        detectable=detectable,
    )


def gain(
    low: float, high: float, *, seconds: tuple[float, float] = (1.3, 1.4), length_changed: bool = False
) -> Speedup:
    return Speedup(
        documents=500,
        tokens=between(0.1, 9),
        tokens_simultaneous=between(low, high),
        seconds=between(*seconds),
        seconds_simultaneous=between(*seconds),
        length_ratio=1.46 if length_changed else 1.0,
        length_changed=length_changed,
    )


def floor(high: float) -> NoiseFloor:
    return NoiseFloor(labels=("k1_first", "k1_last"), spread=between(1.0, high))


@pytest.mark.parametrize(
    ("speed", "points", "noise", "outcome", "text"),
    [
        ((1.21, 1.40), (-4.9, 1.0), 1.02, "confirmed", "inside the margin of 5"),
        ((1.20, 1.40), (-4.9, 1.0), 1.02, "undecided", "1.20× and 1.40×, which is too wide"),
        ((1.21, 1.40), (-5.0, 1.0), 1.02, "undecided", "−5.0 and +1.0 points, which is too wide"),
        ((1.21, 1.40), (-9.0, -5.1), 1.02, "rejected", "a drop beyond the margin of 5"),
        ((1.05, 1.15), (-1.0, 1.0), 1.02, "rejected", "below the declared 1.20×"),
        ((1.05, 1.19), (-1.0, 1.0), 1.02, "undecided", "but within the noise floor"),
        ((0.60, 0.80), (-1.0, 1.0), 2.20, "undecided", "runs at k=1 differ by up to 2.20×"),
        ((1.30, 1.40), (-1.0, 1.0), 1.35, "undecided", "within the noise floor: runs at k=1 differ by up to 1.35×"),
        ((1.00, 1.30), (-9.0, -5.1), 1.02, "rejected", "a drop beyond the margin"),
    ],
)
def test_a_verdict_follows_from_the_ends(
    speed: tuple[float, float], points: tuple[float, float], noise: float, outcome: str, text: str
) -> None:
    found = judge("k2_last", drop(*points), gain(*speed), floor(noise), CRITERIA)
    assert found.outcome == outcome
    assert text in found.sentence
    assert found.sentence.startswith(f"k2_last is {outcome}: ")


def test_nothing_generated_is_judged_by_accuracy_alone() -> None:
    found = judge("k2_last", drop(-2, 1), None, None, CRITERIA, generates=False)
    assert (found.outcome, found.basis) == ("confirmed", "accuracy only")
    assert "speed" not in found.sentence


def test_speed_without_a_noise_floor_is_undecided_but_a_collapse_is_rejected() -> None:
    assert judge("a", drop(-2, 1), gain(1.5, 1.6), None, CRITERIA).outcome == "undecided"
    assert judge("a", drop(-20, -9), gain(1.5, 1.6), None, CRITERIA).outcome == "rejected"
    assert judge("a", drop(-2, 1), None, floor(1.01), CRITERIA).outcome == "undecided"


def test_longer_answers_need_faster_documents() -> None:
    assert judge("a", drop(-2, 1), gain(1.5, 1.6, length_changed=True), floor(1.01), CRITERIA).outcome == "confirmed"
    slow = gain(1.5, 1.6, seconds=(0.9, 1.1), length_changed=True)
    found = judge("a", drop(-2, 1), slow, floor(1.01), CRITERIA)
    assert found.outcome == "undecided"
    assert "(×1.46) and its speed-up in documents lies between 0.90× and 1.10×" in found.sentence
    assert judge("a", drop(-2, 1), gain(1.5, 1.6, seconds=(0.9, 1.1)), floor(1.01), CRITERIA).outcome == "confirmed"


def test_too_few_documents_are_reported_as_too_few() -> None:
    found = judge("a", drop(-9, 6, detectable=12.5), gain(1.5, 1.6), floor(1.01), CRITERIA)
    assert "500 documents can only show a change of 12.5 points or more" in found.sentence


def verdicts(*outcomes: str) -> list[tuple[str, Verdict]]:
    return [(f"c{i}", Verdict(outcome=outcome, sentence="")) for i, outcome in enumerate(outcomes)]


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        (("confirmed", "rejected", "undecided"), "confirmed"),
        (("rejected", "rejected"), "rejected"),
        (("rejected", "undecided"), "undecided"),
        ((), "undecided"),
    ],
)
def test_the_hypothesis_needs_one_configuration(outcomes: tuple[str, ...], expected: str) -> None:
    found = judge_task("gsm8k", verdicts(*outcomes), CRITERIA)
    assert found.outcome == expected
    assert found.sentence.startswith(f"gsm8k is {expected}: ")


def test_a_failed_gate_takes_a_verdict_away() -> None:
    sure = judge("k2_last", drop(-2, 1), gain(1.5, 1.6), floor(1.01), CRITERIA)
    assert withhold(sure, []) == sure
    gone = withhold(sure, ["replay"])
    assert gone.outcome == "undecided"
    assert "(replay); without it the verdict would be confirmed" in gone.sentence
