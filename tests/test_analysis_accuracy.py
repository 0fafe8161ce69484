"""Accuracy: the paired interval, exact McNemar, Holm, Wilson and what a number of documents can show."""

import math

import numpy as np
import pytest
from scipy import optimize, stats

from orchestrator.analysis.accuracy import detectable, documents_needed, holm, mcnemar, paired_difference
from orchestrator.analysis.intervals import (
    MIN_STRATUM,
    Levels,
    accuracy_interval,
    join_small,
    paired_bootstrap,
    tango_interval,
)
from orchestrator.core.totals import wilson_interval

# p-values and Holm's adjusted ones as statsmodels 0.15.0 gives them (multipletests, method "holm").
PUBLISHED = {
    (0.01, 0.04, 0.03, 0.005, 0.2, 0.6): (0.05, 0.12, 0.12, 0.03, 0.4, 0.6),
    (0.5, 0.5, 0.5): (1.0, 1.0, 1.0),
    (0.0123456789,): (0.0123456789,),
    (1e-12, 0.049, 0.049, 1.0): (4e-12, 0.147, 0.147, 1.0),
}


def test_mcnemar_equals_the_exact_binomial_test() -> None:
    for lost in range(0, 60, 3):
        for won in range(0, 60, 7):
            expected = stats.binomtest(lost, lost + won, 0.5).pvalue if lost + won else 1.0
            assert mcnemar(lost, won) == pytest.approx(expected, abs=1e-9)
    assert mcnemar(4200, 3900) == pytest.approx(stats.binomtest(4200, 8100, 0.5).pvalue, abs=1e-9)


@pytest.mark.parametrize("p_values", PUBLISHED)
def test_holm_gives_the_published_values(p_values: tuple[float, ...]) -> None:
    assert holm(p_values) == pytest.approx(PUBLISHED[p_values], abs=1e-9)


@pytest.mark.slow
def test_holm_and_mcnemar_equal_statsmodels() -> None:
    from statsmodels.stats import contingency_tables as tables  # takes a second to import
    from statsmodels.stats import multitest

    rng = np.random.default_rng(0)
    for size in range(1, 40):
        p_values = list(rng.random(size) ** 3)
        assert holm(p_values) == pytest.approx(multitest.multipletests(p_values, method="holm")[1], abs=1e-9)
    for lost, won in rng.integers(0, 80, (50, 2)):
        assert mcnemar(lost, won) == pytest.approx(tables.mcnemar([[5, lost], [won, 5]], exact=True).pvalue, abs=1e-9)


def exact_coverage(documents: int, lost: float, won: float) -> float:
    """The chance that Tango's 95 % interval contains won − lost, summed over all outcomes."""
    rest, total = 1 - lost - won, 0.0
    for a in range(documents + 1):
        for b in range(documents + 1 - a):
            chance = float(stats.multinomial.pmf([a, b, documents - a - b], documents, [lost, won, rest]))
            if chance > 1e-9:
                found = tango_interval(a, b, documents)
                total += chance * (found.low <= won - lost + 1e-12 and won - lost - 1e-12 <= found.high)
    return total


@pytest.mark.parametrize(("lost", "won", "expected"), [(0.06, 0.02, 0.9524), (0.1, 0.05, 0.9555), (0.02, 0.02, 0.9861)])
def test_tango_covers_95_percent_unless_few_answers_change(lost: float, won: float, expected: float) -> None:
    """50 documents. With 2 expected flips no interval can cover 95 %: counts are whole numbers."""
    assert exact_coverage(50, lost, won) == pytest.approx(expected, abs=1e-4)


def test_holm_of_nothing_is_nothing() -> None:
    assert holm([]) == []


def test_wilson_equals_scipy() -> None:
    for right, documents in ((0, 10), (3, 10), (80, 100), (1061, 1319), (100, 100)):
        ours = wilson_interval(right, documents)
        theirs = stats.binomtest(right, documents).proportion_ci(method="wilson")
        assert ours == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_what_so_many_documents_can_show() -> None:
    """The figures that were agreed on beforehand: paired, 80 % power, 5 % to 20 % of the documents changed."""
    for documents, low, high in ((1319, 1.7, 3.4), (100, 6.3, 12.5), (10, 20, 40)):
        assert 100 * detectable(documents, 0.05) == pytest.approx(low, rel=0.02)
        assert 100 * detectable(documents, 0.20) == pytest.approx(high, rel=0.02)


def test_the_detectable_difference_has_80_percent_power() -> None:
    rng, documents, share = np.random.default_rng(1), 1000, 0.1
    effect = detectable(documents, share)
    lost = rng.binomial(documents, (share + effect) / 2, 2000)
    won = rng.binomial(documents - lost, (share - effect) / 2 / (1 - (share + effect) / 2))
    found = np.mean([mcnemar(int(a), int(b)) < 0.05 for a, b in zip(lost, won, strict=True)])
    assert 0.74 < found < 0.84


def test_the_interval_is_that_of_resampled_documents() -> None:
    """Against the slow obvious version: draw documents with replacement, take the mean."""
    rng = np.random.default_rng(2)
    apart = rng.choice([-1.0, 0.0, 1.0], 400, p=[0.1, 0.85, 0.05])
    means = rng.choice(apart, (20_000, 400)).mean(axis=1)
    ours = paired_bootstrap(apart, np.zeros(400, dtype=int), rng)[0]
    assert ours.value == apart.mean()
    assert (ours.low, ours.high) == pytest.approx(np.quantile(means, [0.025, 0.975]), abs=0.004)


def test_strata_take_the_difference_between_subjects_out_of_the_interval() -> None:
    """Half of the subjects always lose and half always win: within a subject nothing varies."""
    strata = np.repeat(np.arange(10), 50)
    apart = np.where(strata < 5, -1.0, 1.0)
    rng = np.random.default_rng(3)
    within = paired_bootstrap(apart, strata, rng)[0]
    plain = paired_bootstrap(apart, np.zeros(500, dtype=int), rng)[0]
    assert within.high - within.low < 0.02 < 0.15 < plain.high - plain.low


def test_small_strata_are_joined() -> None:
    code, sizes = join_small(np.array([0] * 20 + [1, 2, 3] * 2 + [4]))
    assert list(sizes) == [7, 20]
    assert len(set(code[20:])) == 1
    code, sizes = join_small(np.array([0] * 20 + [1]))
    assert list(sizes) == [21]
    code, sizes = join_small(np.arange(30))
    assert list(sizes) == [30]
    assert MIN_STRATUM == 5


def test_no_disagreement_is_not_certainty() -> None:
    found = paired_difference(np.ones(100), np.ones(100), np.zeros(100, dtype=int), rng=np.random.default_rng(0))
    assert found.points.value == 0
    assert found.points.low < -1
    assert found.points.high > 1
    assert found.p_value == 1


def test_one_document_says_nothing_of_others() -> None:
    found = paired_difference(np.ones(1), np.zeros(1), np.zeros(1, dtype=int), rng=np.random.default_rng(0))
    assert (found.points.low, found.points.high) == (-math.inf, math.inf)


def test_levels_share_the_error_among_configurations_and_looks() -> None:
    six, again = Levels(comparisons=6), Levels(comparisons=6, looks=2)
    assert six.simultaneous == pytest.approx(1 - 0.05 / 6)
    assert (1 - six.confirming) / 2 == pytest.approx(0.05 / 6), "one-sided"
    assert six.joint == pytest.approx(0.95), "all must fail: no correction"
    assert (1 - again.joint, 1 - again.simultaneous) == pytest.approx((0.025, 0.025 / 6))


def test_simultaneous_intervals_are_wider() -> None:
    rng = np.random.default_rng(4)
    base, ours = np.ones(300), (rng.random(300) > 0.1).astype(float)
    found = paired_difference(base, ours, np.zeros(300, dtype=int), rng=rng, levels=Levels(comparisons=6))
    assert found.simultaneous.low < found.points.low < found.points.high < found.simultaneous.high
    assert found.simultaneous.low < found.bounds.low < found.points.low, "one-sided at 5 %/6"
    corrected = tango_interval(found.lost - 0.5, 0.5, 300, found.simultaneous.level).percent()
    assert found.simultaneous.high < found.bounds.high == corrected.high, "half a document less is lost"
    assert found.points.high < found.bounds.joint_high < found.bounds.high
    assert found.lost == int((ours == 0).sum())
    assert found.won == 0


def test_a_metric_that_is_no_yes_or_no() -> None:
    rng = np.random.default_rng(5)
    base = rng.random(2000)
    ours = base - 0.02 + rng.normal(0, 0.05, 2000)
    found = paired_difference(base, ours, np.zeros(2000, dtype=int), rng=rng)
    half = 1.96 * 5 / math.sqrt(2000)
    assert found.points.value == pytest.approx(-2, abs=0.3)
    assert found.points.high - found.points.low == pytest.approx(2 * half, rel=0.1)
    own = accuracy_interval(base)
    assert own.low < 0.5 < own.high


def test_the_same_seed_gives_the_same_interval() -> None:
    apart, strata = np.repeat([-1.0, 0.0, 1.0], [9, 88, 3]), np.zeros(100, dtype=int)
    one, other = (paired_bootstrap(apart, strata, np.random.default_rng(7))[0] for _ in range(2))
    assert one == other


def tango_by_likelihood(lost: int, won: int, n: int, level: float) -> tuple[float, float]:
    """The slow obvious version: the likeliest share of lost documents at each difference, and the score's roots."""

    def score(difference: float) -> float:
        def slope(share: float) -> float:  # of the log-likelihood, times all denominators
            rest, other = 1 - 2 * share - difference, share + difference
            return lost * other * rest + won * share * rest - 2 * (n - lost - won) * share * other

        low, high = max(0.0, -difference) + 1e-15, (1 - difference) / 2
        share = optimize.brentq(slope, low, high, xtol=1e-16, rtol=1e-15)
        return float((won - lost - n * difference) / math.sqrt(n * (2 * share + difference * (1 - difference))))

    reach = stats.norm.ppf((1 + level) / 2)
    value, tiny = (won - lost) / n, 1e-12
    low = optimize.brentq(lambda d: score(d) - reach, -1 + tiny, value, xtol=1e-15)
    high = optimize.brentq(lambda d: score(d) + reach, value, 1 - tiny, xtol=1e-15)
    return low, high


@pytest.mark.parametrize("level", [0.95, 1 - 0.05 / 6, 1 - 0.1 / 6])
@pytest.mark.parametrize(
    ("lost", "won", "n"), [(3, 1, 50), (1, 5, 50), (6, 2, 100), (12, 9, 105), (20, 4, 300), (90, 30, 1319), (1, 1, 10)]
)
def test_tango_solves_the_score_equation(lost: int, won: int, n: int, level: float) -> None:
    found = tango_interval(lost, won, n, level)
    assert (found.low, found.high) == pytest.approx(tango_by_likelihood(lost, won, n, level), abs=1e-9)
    mirrored = tango_interval(won, lost, n, level)
    assert (-mirrored.high, -mirrored.low) == pytest.approx((found.low, found.high), abs=1e-12)


@pytest.mark.parametrize("n", [10, 50, 1319])
def test_tango_without_a_change_has_a_closed_form(n: int) -> None:
    reach = stats.norm.ppf(0.975)
    found = tango_interval(0, 0, n)
    expected = reach**2 / (n + reach**2)
    assert (found.low, found.high) == pytest.approx((-expected, expected), abs=1e-9)


@pytest.mark.parametrize(("n", "lost", "won"), [(50, 0.05, 0.0), (50, 0.06, 0.01), (75, 0.07, 0.02), (100, 0.05, 0.0)])
def test_a_drop_at_the_margin_is_seldom_taken_for_inside_it(n: int, lost: float, won: float) -> None:
    """Exactly, by enumeration: six configurations whose true drop is the margin, so 5 %/6 for each."""
    level, wrong, shares = Levels(comparisons=6).confirming, 0.0, [lost, won, 1 - lost - won]
    for a in range(n + 1):
        for b in range(n + 1 - a):
            weight = stats.multinomial.pmf([a, b, n - a - b], n, shares) if b - a > -0.05 * n else 0.0
            if weight > 1e-12:
                wrong += weight * (tango_interval(a, b, n, level).low > -0.05)
    assert 1 - (1 - wrong) ** 6 <= 0.05


def test_documents_needed_for_non_inferiority() -> None:
    """About 480 for six configurations, a margin of 5 and 10 % changed answers; its power by simulation."""
    levels = Levels(comparisons=6)
    needed = documents_needed(0.1, 0.0, 5.0, levels)
    assert needed == pytest.approx(475, abs=10)
    rng = np.random.default_rng(0)
    counts = rng.multinomial(needed, [0.05, 0.05, 0.9], 1500)
    shown = [tango_interval(int(a), int(b), needed, levels.confirming).low > -0.05 for a, b, _ in counts]
    assert 0.75 < np.mean(shown) < 0.85
    assert documents_needed(0.1, -5.0, 5.0, levels) is None
    assert documents_needed(0.1, -12.0, 5.0, levels) < needed
