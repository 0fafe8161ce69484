"""A token reaches workers on other machines without being shown to anybody."""

import pickle

import pytest

from orchestrator.running.environment import AccessTokens

SECRET = "hf_a-secret-that-nobody-may-see"


def test_a_token_is_handed_on_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    access = pickle.loads(pickle.dumps(AccessTokens.from_environment()))
    assert SECRET not in f"{access} {access!r}"
    monkeypatch.delenv("HF_TOKEN")
    access.export()
    assert AccessTokens.from_environment() == access


def test_a_nodes_own_token_stays_where_the_command_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    nothing = AccessTokens.from_environment()
    assert nothing == AccessTokens({})
    monkeypatch.setenv("HF_TOKEN", SECRET)
    nothing.export()
    assert AccessTokens.from_environment().variables == {"HF_TOKEN": SECRET}
