"""The drift profile: what it measures, which layers it suggests, and the command around it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle.model import BlockState, forward
from small_models import DEPTH, shallow, shallow_oracle
from test_commands import Outcome, run  # noqa: F401 (a fixture)

from sampler import DecodeSettings, Prompt, ReusePolicy
from sampler.decode import decode_prompts
from sampler.drift import GROUPS, MASKED, REVEALED, SETTLED, ChangeSums, Profile, Profiler, group_of, profile
from sampler.plan import compute_all
from sampler.policies.periodic import Periodic

torch.set_num_threads(1)


def test_positions_are_grouped_by_when_they_were_revealed() -> None:
    assert group_of(None, 3) == MASKED
    assert group_of(2, 3) == REVEALED
    assert group_of(1, 3) == SETTLED
    assert group_of(-1, 3) == SETTLED
    assert group_of(-1, 0) == SETTLED


def test_a_profile_measures_what_the_oracle_computes() -> None:
    """The second pass of a block, layer by layer, from the tokens that the first one left."""
    seen: list[Any] = []
    found = Profile(depth=DEPTH)

    def note(step: Any) -> None:
        seen.append(step)
        found.add(step)
        if len(seen) == 2:
            raise KeyboardInterrupt

    settings = DecodeSettings(threshold=0.5, block_cache=False, max_new_tokens=30)
    with pytest.raises(KeyboardInterrupt):
        list(
            decode_prompts(shallow(), [Prompt(ids=(3, 1, 4, 1, 5))], policy=Profiler(), settings=settings, on_step=note)
        )
    oracle, state = shallow_oracle(), BlockState()
    start = [3, 1, 4, 1, 5, *[oracle.mask] * 27]
    forward(oracle, start, range(32), compute_all(DEPTH), state)
    before = {key: state.attention[key] + state.mlp[key] for key in state.mlp}
    forward(oracle, seen[0].tokens, range(32), compute_all(DEPTH), state)
    revealed = [p for p in range(32) if seen[0].tokens[p] != start[p]]
    for layer in range(DEPTH):
        changes = [
            float((state.attention[layer, p] + state.mlp[layer, p] - before[layer, p]).abs().sum()) for p in revealed
        ]
        sizes = [float(before[layer, p].abs().sum()) for p in revealed]
        got = found.of(layer, step=1, group=REVEALED)
        assert (got.change, got.size) == (pytest.approx(sum(changes), rel=1e-3), pytest.approx(sum(sizes), rel=1e-3))
        assert got.positions == len(revealed)
    assert sum(found.of(0, group=group).positions for group in GROUPS) == 32


def test_profiling_does_not_change_the_tokens() -> None:
    settings = DecodeSettings(threshold=0.6, max_new_tokens=50)
    prompts = [Prompt(ids=tuple(range(length))) for length in (3, 33, 40)]
    watched = sorted(decode_prompts(shallow(), prompts, policy=Profiler(), settings=settings, batch_size=2))
    plain = sorted(decode_prompts(shallow(), prompts, policy=ReusePolicy.parse("k1"), settings=settings, batch_size=2))
    assert [g.ids for _, g in watched] == [g.ids for _, g in plain]
    assert profile(shallow(), prompts, settings=settings).passes > 5


def test_the_layers_that_change_least_are_suggested_but_never_layer_0() -> None:
    found = Profile(depth=6)
    for layer, change in enumerate((0.0, 0.5, 0.1, 0.2, 0.9, 0.3)):
        found.cells[layer, 1, MASKED] = ChangeSums(change=change, size=change, stream=1.0, positions=1)
    assert found.suggestion(1) == "k2_2"
    assert found.suggestion(3) == "k2_2-3+5"
    bound = ReusePolicy.parse(found.suggestion(3)).bind(6)
    assert isinstance(bound, Periodic)


def test_the_command_prints_a_table_a_figure_and_a_suggestion(run: Any, tmp_path: Path) -> None:  # noqa: F811
    lines = [{"id": n, "ids": [5, 3, 8 + n]} for n in range(2)]
    flags = ("--ids", "--max-new-tokens", "40", "--threshold", "0.6", "--size", "5")
    figure = tmp_path / "drift.svg"
    shown: Outcome = run("profile", lines, *flags, "--figure", str(figure))
    assert shown.code == 0, shown.err
    table, suggested = shown.out.splitlines(), shown.out.strip().rpartition(" ")[2]
    assert len([line for line in table if line[:5].strip().isdigit()]) == 28
    assert len(ReusePolicy.parse(suggested).layer_indices(28)) == 5
    assert b"<svg" in figure.read_bytes()
    reported = json.loads(run("profile", lines, *flags, "--json").out)
    assert reported["suggested"] == suggested
    assert reported["layers"][3]["steps"]["1"].keys() == set(GROUPS)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--figure", "drift.pdf"], "figure drift.pdf must end in .svg or .png"),
        (["--figure", "no/such/folder/drift.svg"], "directory no/such/folder does not exist"),
        (["--size", "28"], "(got 28)"),
        (["--max-new-tokens", "1", "--small-block", "32"], "no block took a second pass"),
    ],
)
def test_mistakes_are_explained(run: Any, flags: list[str], complaint: str) -> None:  # noqa: F811
    shown: Outcome = run("profile", [{"id": 1, "ids": [1, 2, 3]}], "--ids", *flags)
    assert (shown.code, shown.out) == (2, "")
    assert complaint in shown.err
    assert shown.err.count("\n") == 1
