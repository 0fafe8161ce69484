"""Gauges tell configurations apart, and say nothing about what is not known yet."""

from made_rows import made_rows
from test_tally import configuration, row

from orchestrator.running.metrics import TAGS, SweepMetrics, tags_of
from orchestrator.watching.tally import tally_of


def test_no_two_configurations_share_their_tags() -> None:
    rows = [row("a", "k1"), row("b", "k1", threshold=0.9), row("c", "k1", block_cache=False), row("d", "k2_last")]
    tags = [tags_of("demo-01234567", line) for line in tally_of(made_rows(rows))]
    assert len({tuple(one.items()) for one in tags}) == 4
    assert all(tuple(one) == TAGS for one in tags)
    assert tags[0] | {"settings": ""} == {"sweep": "demo-01234567", "task": "gsm8k", "policy": "k1", "settings": ""}


def test_gauges_take_totals_with_and_without_figures() -> None:
    totals = tally_of(made_rows([row("a", "k1"), row("b", "k2_last", correct=None, tokens=0)]))
    waiting = tally_of(made_rows([]), {configuration("gsm8k", "k3_last"): 10})
    SweepMetrics("demo-01234567").update([*totals, *waiting])
