"""Verdicts follow from one-sided bounds, never from the values between them."""

import pytest

from orchestrator.analysis.accuracy import PairedDifference
from orchestrator.analysis.intervals import Bounds, Estimate, Levels
from orchestrator.analysis.speedups import Speedup
from orchestrator.analysis.verdicts import Compared, Criteria, Verdict, judge_all, judge_task, withhold

CRITERIA = Criteria(margin=5.0, speedup=1.2)
SIX = Levels(comparisons=6)


def between(low: float, high: float) -> Estimate:
    return Estimate(value=(low + high) / 2, low=low, high=high)


def bounds(low: float, high: float, joint_high: float | None = None) -> Bounds:
    """`high` decides on one configuration; `joint_high`, which is lower, if all fail."""
    levels = {"low_level": 0.99, "high_level": 0.995, "joint_level": 0.975}
    return Bounds(low=low, high=high, joint_high=high if joint_high is None else joint_high, **levels)


def drop(low: float, high: float, joint_high: float | None = None) -> PairedDifference:
    return PairedDifference(
        documents=500,
        lost=10,
        won=5,
        both_right=400,
        points=between(low, high),
        simultaneous=between(-99, 99),
        bounds=bounds(low, high, joint_high),
        p_value=0.5,
        p_holm=0.5,
        disagreement=0.03,
        detectable=2.0,
    )


def gain(
    low: float,
    high: float,
    joint_high: float | None = None,
    *,
    seconds: tuple[float, float] = (1.3, 1.4),
    length: tuple[float, float] = (0.98, 1.02),
    noise_known: bool = True,
) -> Speedup:
    middle = sum(length) / 2
    return Speedup(
        documents=500,
        trials=50.0,
        tokens=between(low, high),
        tokens_simultaneous=between(0.1, 9),
        tokens_bounds=bounds(low, high, joint_high),
        seconds=between(*seconds),
        seconds_simultaneous=between(*seconds),
        seconds_bounds=bounds(*seconds),
        length=between(*length),
        length_changed=abs(middle - 1) > 0.1,
        noise_known=noise_known,
    )


def judge(difference: PairedDifference, speed: Speedup | None, *, generates: bool = True) -> Verdict:
    [found] = judge_all(
        [Compared(label="k2_last", difference=difference, speedup=speed)], CRITERIA, Levels(), generates=generates
    )
    return found


@pytest.mark.parametrize(
    ("speed", "points", "outcome", "text"),
    [
        (
            (1.21, 1.40),
            (-4.9, 1.0),
            "confirmed",
            "above the declared 1.20×; at most 4.9 points lost",
        ),
        ((1.20, 1.40), (-4.9, 1.0), "undecided", "1.20× and 1.40×, which is too wide"),
        ((1.21, 1.40), (-5.0, 1.0), "undecided", "−5.0 and +1.0 points, which is too wide"),
        ((1.21, 1.40), (-9.0, -5.1), "rejected", "at least 5.1 points lost, beyond the margin of 5"),
        ((1.05, 1.15), (-1.0, 1.0), "rejected", "at most 1.15× as fast, below the declared 1.20×"),
        ((1.05, 1.19), (-1.0, 1.0), "rejected", "at most 1.19× as fast"),
        ((1.00, 1.30), (-9.0, -5.1), "rejected", "beyond the margin"),
    ],
)
def test_a_verdict_follows_from_the_bounds(
    speed: tuple[float, float], points: tuple[float, float], outcome: str, text: str
) -> None:
    found = judge(drop(*points), gain(*speed))
    assert found.outcome == outcome
    assert text in found.sentence
    assert found.sentence.startswith(f"k2_last is {outcome}: ")
    assert (found.level is None) == (outcome == "undecided")


def test_nothing_generated_is_judged_by_accuracy_alone() -> None:
    found = judge(drop(-2, 1), None, generates=False)
    assert (found.outcome, found.basis) == ("confirmed", "accuracy only")
    assert "fast" not in found.sentence


def test_unknown_trial_noise_leaves_speed_undecided_but_a_collapse_is_rejected() -> None:
    unknown = gain(1.5, 1.6, noise_known=False)
    assert judge(drop(-2, 1), unknown).outcome == "undecided"
    assert judge(drop(-2, 1), gain(0.5, 0.6, noise_known=False)).outcome == "undecided"
    assert judge(drop(-20, -9), unknown).outcome == "rejected"
    assert judge(drop(-2, 1), None).outcome == "undecided"


def test_longer_answers_need_faster_documents() -> None:
    longer = (1.40, 1.50)
    assert judge(drop(-2, 1), gain(1.7, 1.8, length=longer)).outcome == "confirmed"
    found = judge(drop(-2, 1), gain(1.5, 1.6, seconds=(0.9, 1.3), length=longer))
    assert found.outcome == "undecided"
    assert "(×1.45) and its speed-up in documents lies between 0.90× and 1.30×" in found.sentence
    assert judge(drop(-2, 1), gain(1.5, 1.6, seconds=(0.9, 1.1))).outcome == "confirmed", "lengths did not change"


def test_more_tokens_per_second_on_documents_that_surely_take_longer_is_rejected() -> None:
    """The original experiment's k=3: 1.25× in tokens/s, 46 % more tokens, documents at 0.84× to 0.88×."""
    found = judge(drop(-2, 1), gain(1.21, 1.29, seconds=(0.84, 0.88), length=(1.41, 1.51)))
    assert found.outcome == "rejected"
    assert "at most 0.88× as fast in documents per second" in found.sentence
    doubtful = judge(drop(-2, 1), gain(1.21, 1.29, seconds=(0.84, 0.88), length=(1.05, 1.51)))
    assert doubtful.outcome == "undecided", "its answers may be as long as those of k=1"


def compared(*speeds: tuple[float, float, float]) -> list[Compared]:
    return [Compared(label=f"c{i}", difference=drop(-2, 1), speedup=gain(*one)) for i, one in enumerate(speeds)]


def test_all_are_rejected_if_all_fail_at_the_uncorrected_level() -> None:
    """An intersection-union test: no correction for the number of configurations."""
    alone = (1.0, 1.25, 1.18)  # fails at 97.5 %, not at 97.5 %/6
    assert [v.outcome for v in judge_all(compared(*[alone] * 6), CRITERIA, SIX)] == ["rejected"] * 6
    [first, *_] = judge_all(compared(*[alone] * 6), CRITERIA, SIX)
    assert "all 6 configurations fail (97.5 % bounds)" in first.sentence
    one_may_pass = judge_all(compared(*[alone] * 5, (1.0, 1.25, 1.22)), CRITERIA, SIX)
    assert [v.outcome for v in one_may_pass] == ["undecided"] * 6
    invalid = judge_all(compared(*[alone] * 6), CRITERIA, SIX, valid=False)
    assert [v.outcome for v in invalid] == ["undecided"] * 6, "a gate failed for one of them"


def test_an_undecided_sentence_says_how_many_documents_and_trials_are_needed() -> None:
    found = judge(drop(-9, 6), gain(1.10, 1.26))
    assert "if it stays at 1.18×, about" in found.sentence
    assert "trials per configuration, or" in found.sentence
    assert "if it stays at −1.5, about" in found.sentence
    assert found.documents_needed is not None
    assert found.documents_needed > 500
    assert "too close to it for any number" in judge(drop(-11, 1), gain(1.3, 1.5)).sentence
    task = judge_task("gsm8k", [("k2_last", found)], CRITERIA)
    assert "documents would settle it." in task.sentence


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


def test_a_verdict_on_a_task_names_few_configurations_and_counts_many() -> None:
    few, many = verdicts(*["undecided"] * 9), verdicts(*["undecided"] * 10)
    assert "c0, c1, c2, c3, c4, c5, c6, c7 and c8 may" in judge_task("gsm8k", few, CRITERIA).sentence
    assert "; 10 configurations may" in judge_task("gsm8k", many, CRITERIA).sentence


def test_a_verdict_that_a_gate_took_away_does_not_call_configurations_possible() -> None:
    sentence = judge_task("gsm8k", verdicts("rejected", "undecided"), CRITERIA, ["speed at k=1"]).sentence
    assert sentence.endswith(" points, and validity gates failed (speed at k=1).")
    assert " may" not in sentence


def test_a_failed_gate_takes_a_verdict_away() -> None:
    sure = judge(drop(-2, 1), gain(1.5, 1.6))
    assert withhold("k2_last", sure, []) == sure
    gone = withhold("k2_last", sure, ["replay"])
    assert gone.outcome == "undecided"
    assert gone.sentence.startswith("k2_last is undecided, because ")
    assert "(replay); without it the verdict would be confirmed" in gone.sentence
