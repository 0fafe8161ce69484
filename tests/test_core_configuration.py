"""The one definition of a configuration, its settings and its names."""

from typing import Any

import pytest

from orchestrator.core.configuration import CONFIGURATION_KEYS, DECODE_SETTINGS, Configuration, grid, varying_settings
from orchestrator.core.trial import TRIAL_KEYS, Trial, trial_key
from sampler.records import DecodeSettings

CHANGED = Configuration(policy="k2_middle", threshold=0.9, small_block=4, block_cache=False)


def test_defaults_are_the_samplers() -> None:
    assert Configuration(policy="k1").decode_settings == DecodeSettings()
    assert DECODE_SETTINGS == ("threshold", "small_block", "block_cache", "reveal")


@pytest.mark.parametrize(
    ("changes", "label", "slug"),
    [
        ({}, "k2_middle", "k2_middle"),
        ({"threshold": 0.9}, "k2_middle threshold 0.9", "k2_middle_t0.9"),
        ({"small_block": 4}, "k2_middle small block 4", "k2_middle_b4"),
        ({"block_cache": False}, "k2_middle block cache off", "k2_middle_nocache"),
        ({"reveal": "margin=0.5"}, "k2_middle reveal margin=0.5", "k2_middle_margin=0.5"),
        ({"reveal": "topk=2", "threshold": 0.9}, "k2_middle reveal topk=2", "k2_middle_topk=2"),
    ],
)
def test_label_and_slug_name_only_changed_settings(changes: dict[str, Any], label: str, slug: str) -> None:
    configuration = Configuration(policy="k2_middle", **changes)
    assert (configuration.label(), configuration.slug()) == (label, slug)


def test_label_names_the_settings_asked_for() -> None:
    configuration = Configuration(policy="k1")
    assert configuration.label(["threshold", "block_cache"]) == "k1 threshold 0.95 block cache on"
    assert configuration.slug(["threshold", "block_cache"]) == "k1_t0.95_cache"
    assert configuration.settings_label() == "threshold 0.95, small block 8, block cache on"


def test_a_reveal_rule_and_the_threshold_are_one_setting_to_a_reader() -> None:
    """A threshold keeps the identity that it had before there were other rules."""
    lower, margin = Configuration(policy="k1", threshold=0.9), Configuration(policy="k1", reveal="margin=0.5")
    assert lower.identity() == {"policy": "k1", "threshold": 0.9, "small_block": 8, "block_cache": True}
    assert margin.identity()["reveal"] == "margin=0.5"
    assert margin == Configuration(policy="k1", reveal="margin=0.5", threshold=0.7), "it uses no threshold"
    shown = varying_settings([lower, margin])
    assert [one.label(shown) for one in (lower, margin)] == ["k1 threshold 0.9", "k1 reveal margin=0.5"]
    assert [one.slug(shown) for one in (lower, margin)] == ["k1_t0.9", "k1_margin=0.5"]
    assert margin.changed_from(lower) == lower.changed_from(margin) == ("reveal",)
    assert margin.settings_label() == "small block 8, block cache on, reveal margin=0.5"


def test_a_rule_that_uses_no_threshold_is_once_in_a_grid() -> None:
    found = grid({"policies": ["k1"], "threshold": [0.9, 1.0], "reveal": ["threshold", "topk=2"]})
    assert [one.label() for one in found] == ["k1 threshold 0.9", "k1 reveal topk=2", "k1 threshold 1"]


def test_settings_that_vary_or_differ_from_a_reference() -> None:
    other = Configuration(policy="k3_last", threshold=0.9)
    assert varying_settings([CHANGED, other]) == ("small_block", "block_cache")
    assert CHANGED.changed_from(other) == ("small_block", "block_cache")
    assert varying_settings([]) == ()


def test_a_stored_trial_without_a_newer_setting_gets_its_default() -> None:
    trial = Trial(trial_id="ab", task="gsm8k", configuration=CHANGED, repeat=1, shard=3)
    stored = trial.as_dict()
    assert tuple(stored) == ("trial_id", *TRIAL_KEYS)
    assert Trial.from_dict(stored) == trial
    assert trial.label == "gsm8k/k2_middle_t0.9_b4_nocache/3.r1"
    assert trial_key(stored) == trial.key
    del stored["block_cache"]
    assert Trial.from_dict(stored).configuration.block_cache is True
    assert CONFIGURATION_KEYS[0] == "policy"
