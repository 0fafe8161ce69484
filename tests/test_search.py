"""`sweep --search`: policies proposed by Optuna, raced in rounds, and the best one confirmed on other documents."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from sweep_runs import ROOT, SECONDS

from orchestrator.cli.search import Proposal, Proposer, best_of
from orchestrator.cli.sweep import parse_sweep
from orchestrator.core.race import half_of
from orchestrator.planning.settings import search_space
from orchestrator.store import Store
from sampler.errors import InputErrors
from sampler.policy import ReusePolicy

MARGIN = 5.0


def near(policy: str, best: str) -> int:
    """How many of rule, number, layers and options two policies share."""
    a, b = (ReusePolicy.parse(name) for name in (policy, best))
    same_rule = type(a.rule) is type(b.rule)
    return (
        same_rule
        + (same_rule and str(a.rule) == str(b.rule))
        + (a.layers == b.layers)
        + (same_rule and a.rule.options == b.rule.options)
    )


def planted(best: str, noise: random.Random) -> Callable[[str], Proposal]:
    """An objective that grows towards `best`, the only policy that is both fast and accurate enough to win."""

    def measure(policy: str) -> Proposal:
        shared = near(policy, best)
        speedup = 1 + 0.08 * shared + noise.gauss(0, 0.003)
        difference = -8 + 1.5 * shared + noise.gauss(0, 0.3)
        return Proposal(
            policy=policy,
            outcome="undecided",
            difference=difference,
            speedup=speedup,
            speedup_low=speedup - 0.01,
            documents=10,
        )

    return measure


def searched(
    policies: tuple[str, ...], measure: Callable[[str], Proposal], seed: int, rounds: int = 5
) -> list[Proposal]:
    proposer, found = Proposer(policies, seed), list[Proposal]()
    for _ in range(rounds):
        new = [measure(policy) for policy in proposer.propose(4)]
        proposer.tell(new)
        found += new
    return found


@pytest.mark.slow
def test_each_policy_is_proposed_once_and_the_same_results_lead_to_the_same_proposals() -> None:
    policies = search_space()[:12]
    first, again = (searched(policies, planted(policies[3], random.Random(1)), seed=4, rounds=3) for _ in range(2))
    assert first == again
    assert sorted(one.policy for one in first) == sorted(policies)


def test_a_small_space_is_proposed_whole() -> None:
    policies = search_space()[:3]
    assert sorted(Proposer(policies, 0).propose(4)) == sorted(policies)


@pytest.mark.slow
def test_a_planted_optimum_is_found() -> None:
    """In at least nine of ten searches of 20 policies among 68."""
    policies = tuple(str(ReusePolicy.parse(name)) for name in search_space())
    hits = 0
    for seed in range(10):
        best = random.Random(100 + seed).choice(policies)
        found = best_of(searched(policies, planted(best, random.Random(seed)), seed), MARGIN)
        hits += found is not None and found.policy == best
    assert hits >= 9


def test_the_best_is_confirmed_before_it_is_fast() -> None:
    base = Proposal(policy="a", outcome="confirmed", difference=-1, speedup=1.3, speedup_low=1.2, documents=9)
    faster = replace(base, policy="b", outcome="undecided", speedup=1.5)
    inaccurate = replace(base, policy="c", outcome="undecided", difference=-6, speedup=2)
    rejected = replace(base, policy="d", outcome="rejected", speedup=3)
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
    flags += ["--policies", "k2_first,k2_middle,k2_last,k3_last", "--out", str(tmp_path), "--name", "found", "--quiet"]
    command = [sys.executable, "-m", "orchestrator.sweep", *flags, "--no-dashboard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "found"
    stored = json.loads((folder / "search.json").read_bytes())
    (proposed,) = stored["rounds"].values()
    assert len({one["policy"] for one in proposed}) == 3
    for name, half in (("round-1", "first"), ("confirmation", "second")):
        record = Store(folder / name).read_sweep_record()
        assert record is not None
        assert record["identity"]["half"] == half
        doc_ids = Store(folder / name).rows(columns=["doc_id"])["doc_id"].to_pylist()
        assert {half_of(0, "gsm8k", doc_id) for doc_id in doc_ids} == {half}
    assert f"{stored['confirmation']['policy']} is" in done.stdout
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert again.returncode == 0, again.stderr
    assert json.loads((folder / "search.json").read_bytes()) == stored
