"""`sweep --search`: configurations proposed by Optuna, raced in rounds, the best one confirmed on other documents."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from sweep_process import ROOT, SECONDS

from orchestrator.cli.search import Proposal, Proposer, _measured, best_of, coordinates, search_space
from orchestrator.cli.sweep import parse_sweep
from orchestrator.core.configuration import Configuration
from orchestrator.core.trial import half_of
from orchestrator.store import Store
from sampler.errors import InputErrors
from sampler.policy import ReusePolicy

MARGIN = 5.0
DECODE_SETTINGS_ALONE = ("--policies", "k1", "--threshold", "0.95,0.9", "--small-block", "8,4")


def space(*flags: str) -> list[str]:
    """What `--search` with these flags chooses from."""
    return search_space(parse_sweep(["--tasks", "gsm8k", "--race", "--search", "20", *flags]).settings.as_dict())


def near(one: str, best: str) -> float:
    """How many of rule, number, layers, options and decode settings two configurations share."""
    mine, its = (Configuration.parse(text) for text in (one, best))
    a, b = (ReusePolicy.parse(found.policy) for found in (mine, its))
    same_rule = type(a.rule) is type(b.rule)
    return (
        same_rule
        + (same_rule and str(a.rule) == str(b.rule))
        + (a.layers == b.layers)
        + (same_rule and a.rule.options == b.rule.options)
        + (1 - 5 * abs(mine.threshold - its.threshold))
        + (mine.small_block == its.small_block)
    )


def planted(best: str, noise: random.Random) -> Callable[[str], Proposal]:
    """An objective that grows towards `best`, the only policy that is both fast and accurate enough to win."""

    def measure(configuration: str) -> Proposal:
        shared = near(configuration, best)
        speedup = 1 + 0.08 * shared + noise.gauss(0, 0.003)
        difference = -11 + 1.5 * shared + noise.gauss(0, 0.3)
        return Proposal(
            configuration=configuration,
            outcome="undecided",
            difference=difference,
            speedup=speedup,
            speedup_low=speedup - 0.01,
            documents=10,
        )

    return measure


def searched(
    configurations: list[str], measure: Callable[[str], Proposal], seed: int, rounds: int = 5
) -> list[Proposal]:
    proposer, found = Proposer(configurations, seed), list[Proposal]()
    for _ in range(rounds):
        new = [measure(one) for one in proposer.propose(4)]
        proposer.tell(new)
        found += new
    return found


@pytest.mark.slow
def test_each_configuration_is_proposed_once_and_the_same_results_lead_to_the_same_proposals() -> None:
    some = space("--threshold", "0.95,0.8")[:12]
    first, again = (searched(some, planted(some[3], random.Random(1)), seed=4, rounds=3) for _ in range(2))
    assert first == again
    assert sorted(one.configuration for one in first) == sorted(some)


@pytest.mark.parametrize("flags", [("--policies", "k1,k2_first,k2_last,skip_all"), DECODE_SETTINGS_ALONE])
def test_a_small_space_is_proposed_whole(flags: tuple[str, ...]) -> None:
    some = space(*flags)
    assert len(some) == 3
    assert sorted(Proposer(some, 0).propose(4)) == sorted(some)


def test_the_space_has_rules_numbers_layers_and_decode_settings() -> None:
    some = space("--policies", "k2_first,k3_first,k3_last.small", "--threshold", "0.95,0.8", "--small-block", "8,16")
    assert len(some) == 3 * 4 + 3, "each policy at four settings, and k=1 at all but the first"
    assert "k1:threshold=0.8:small-block=16" in some
    assert "k1" not in some, "the reference is not a proposal"
    places = coordinates(some)
    assert places["k3_first:threshold=0.8"] == {
        "rule": "k", "strength": 1, "layers": "first", "threshold": 0, "small_block": 0,
    }  # fmt: skip
    assert places["k3_last.small"]["rule"] == "k.small"
    assert places["k1:small-block=16"]["layers"] == "any"
    assert len({tuple(place.items()) for place in places.values()}) == len(some), "each has its own place"
    revealed = coordinates(space("--policies", "k2_first", "--reveal", "threshold,topk=2", "--threshold", "0.95,0.8"))
    assert revealed["k2_first:reveal=topk=2"] == {
        "rule": "k", "strength": 0, "layers": "first", "threshold": "any", "reveal": "topk=2",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "rounds"), [((), 5), (("--threshold", "0.95,0.9,0.8,0.7", "--small-block", "8,16"), 7)]
)
def test_a_planted_optimum_is_found(flags: tuple[str, ...], rounds: int) -> None:
    """In at least nine of ten searches: of 20 configurations among 68, and of 28 among 551."""
    some = space(*flags)
    hits = 0
    for seed in range(10):
        best = random.Random(100 + seed).choice(some)
        found = best_of(searched(some, planted(best, random.Random(seed)), seed, rounds), MARGIN)
        hits += found is not None and found.configuration == best
    assert hits >= 9


def test_the_best_is_confirmed_before_it_is_fast() -> None:
    base = Proposal(configuration="a", outcome="confirmed", difference=-1, speedup=1.3, speedup_low=1.2, documents=9)
    faster = replace(base, configuration="b", outcome="undecided", speedup=1.5)
    inaccurate = replace(base, configuration="c", outcome="undecided", difference=-6, speedup=2)
    rejected = replace(base, configuration="d", outcome="rejected", speedup=3)
    assert best_of([rejected, inaccurate, faster, base], MARGIN) == base
    assert best_of([rejected, inaccurate, faster], MARGIN) == faster
    assert best_of([rejected, inaccurate], MARGIN) is None


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--search", "4"], "--search needs --race"),
        (["--search", "4", "--race", "--half", "first"], "--search and --half must not be used together"),
        (["--search", "0", "--race"], "--search must be at least 1"),
        (["--half", "third"], "--half must be first or second (got third)"),
    ],
)
def test_wrong_flags(flags: list[str], sentence: str) -> None:
    with pytest.raises(InputErrors, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        parse_sweep(["--tasks", "gsm8k", *flags])


def test_halves_are_a_partition() -> None:
    ids = [f"gsm8k/{number}" for number in range(1000)]
    first = [one for one in ids if half_of(0, "gsm8k", one) == "first"]
    assert 400 < len(first) < 600
    assert first != [one for one in ids if half_of(1, "gsm8k", one) == "first"]


@pytest.mark.slow
def test_a_search_of_the_bundled_model(tmp_path: Path) -> None:
    """Rounds run on one half, the confirmation on the other; the same command again changes nothing."""
    flags = ["--tasks", "gsm8k", "--limit", "24", "--race", "--search", "3", "--margin", "40"]
    flags += ["--policies", "k2_first,k3_last", "--threshold", "0.95,0.5", "--out", str(tmp_path), "--name", "found"]
    flags += ["--quiet"]
    command = [sys.executable, "-m", "orchestrator.sweep", *flags, "--no-dashboard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "found"
    stored = json.loads((folder / "search.json").read_bytes())
    (proposed,) = stored["rounds"].values()
    assert len({one["configuration"] for one in proposed}) == 3
    assert all(one["intervals"] for one in proposed), "each was compared with k=1 at threshold 0.95"
    assert _measured(folder / "round-1", [one["configuration"] for one in proposed])[0].documents > 0
    for name, half in (("round-1", "first"), ("confirmation", "second")):
        record = Store(folder / name).read_sweep_record()
        assert record is not None
        assert record["identity"]["half"] == half
        doc_ids = Store(folder / name).rows(columns=["doc_id"])["doc_id"].to_pylist()
        assert {half_of(0, "gsm8k", doc_id) for doc_id in doc_ids} == {half}
    assert f"{stored['confirmation']['configuration']} is" in done.stdout
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert again.returncode == 0, again.stderr
    assert json.loads((folder / "search.json").read_bytes()) == stored
