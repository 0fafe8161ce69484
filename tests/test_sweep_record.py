"""A sweep's folder against a new command: continue, extend, or refuse with all that differs."""

import json
from dataclasses import replace
from typing import Any

import pytest
from test_sweep_grid import IDENTITY

from orchestrator.planning.settings import SweepSettings
from orchestrator.planning.sweep_record import FIXED, adopt_resolved, combine, describe_extension, new_record
from sampler import InputError

SETTINGS = SweepSettings(tasks=("gsm8k",), policies=("k1", "k2_middle"), threshold=(0.95,), small_block=(8,), limit=100)
FACTS = {"kind": "generate", "primary": "exact_match", "documents": 100, "fewshot": 0, "source": "hub", "datasets": {}}
ONE = replace(IDENTITY, datasets={"gsm8k": IDENTITY.datasets["gsm8k"]})
OTHER = {
    "model": "x",
    "model_revision": "y",
    "depth": 2,
    "dtype": "float16",
    "subset_size": 1,
    "data": "folder",
    "sample": 3,
    "fewshot": 5,
    "chat_template": False,
    "max_new_tokens": 3,
    "batch_size": 2,
    "shard_size": 3,
    "family": "sdar",
    "block_size": 4,
    "thinking": True,
    "half": "first",
}


def request(settings: SweepSettings = SETTINGS, identity: Any = ONE, **facts: Any) -> dict[str, Any]:
    model = {"source": "owner/name", "revision": "c" * 40, "depth": 36, "parameters": 7}
    tasks = {task: {**FACTS, **facts} for task in settings.tasks}
    made = new_record(settings=settings, identity=identity, model=model, tasks=tasks)
    restored: dict[str, Any] = json.loads(json.dumps(made))
    assert restored == made, "as sweep.json holds it"
    return {"sweep": "x-1", "created": "today", "commands": [1], **restored}


def test_the_first_command_begins_a_sweep() -> None:
    assert combine(None, request()) == request()
    assert request()["margin"] == 5.0
    assert request()["speedup"] == 1.2


def test_the_same_command_continues() -> None:
    combined = combine(request(), request())
    assert combined == request()
    assert describe_extension(request(), combined) == []


def test_the_machine_may_change() -> None:
    now = request(replace(SETTINGS, actors=4, address="auto", out="there", quiet=True, seed=3), replace(ONE, seed=3))
    combined = combine(request(), now)
    assert describe_extension(request(), combined) == []
    assert combined["settings"]["actors"] == 4
    assert combined["sweep"] == "x-1"


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({"policies": ("k2_middle", "k3_last")}, "policies k3_last"),
        ({"threshold": (0.9, 0.95)}, "threshold 0.9"),
        ({"small_block": (4,)}, "small block 4"),
        ({"block_cache": (False, True)}, "block cache off"),
        ({"repeats": 3}, "repeats 3"),
        ({"limit": 200}, "limit 200"),
        ({"limit": None}, "limit all"),
    ],
)
def test_more_extends(change: dict[str, Any], reported: str) -> None:
    combined = combine(request(), request(replace(SETTINGS, **change)))
    assert describe_extension(request(), combined) == [reported]
    (name,) = change
    kept = combined["settings"][name]
    if isinstance(kept, list):
        assert set(kept) == {*getattr(SETTINGS, name), *change[name]}
        assert kept[: len(getattr(SETTINGS, name))] == list(getattr(SETTINGS, name)), "what was first stays first"
    again = combine(combined, request())
    assert again["settings"] == combined["settings"] | {}, "asking for less again takes nothing away"


def test_another_task_extends() -> None:
    now = request(replace(SETTINGS, tasks=("mmlu",)), replace(IDENTITY, datasets={"mmlu": {"cais/mmlu": "b" * 40}}))
    combined = combine(request(), now)
    assert combined["settings"]["tasks"] == ["gsm8k", "mmlu"]
    assert combined["tasks"].keys() == combined["identity"]["datasets"].keys() == {"gsm8k", "mmlu"}


def test_documents_only_grow() -> None:
    assert combine(request(documents=100), request(documents=50))["tasks"]["gsm8k"]["documents"] == 100
    assert combine(request(documents=100), request(documents=500))["tasks"]["gsm8k"]["documents"] == 500


@pytest.mark.parametrize("key", OTHER)
def test_whatever_would_change_trials_is_refused_by_name(key: str) -> None:
    other = replace(ONE, **{key: OTHER[key]})
    with pytest.raises(InputError) as error:
        combine(request(), request(identity=other), folder="results/mine")
    sentence = str(error.value)
    words = {"None": "not given", "True": "on", "False": "off"}
    old, new = (words.get(str(value), str(value)) for value in (getattr(ONE, key), OTHER[key]))
    assert f"results/mine was made with {FIXED[key]} {old} (now {new}): repeat the old values" in sentence
    assert sentence.endswith("or start another sweep with --name")


def test_all_that_differs_is_reported_at_once() -> None:
    now = request(replace(SETTINGS, margin=3.0, speedup=2.0), replace(ONE, **OTHER))
    with pytest.raises(InputError) as error:
        combine(request(), now)
    for name in (*(FIXED[key] for key in OTHER), "--margin 5.0 (now 3.0)", "--speedup 1.2 (now 2.0)"):
        assert f"{name}" in str(error.value)
    assert FIXED.keys() - OTHER.keys() == {"seed", "race"}  # each has a test of its own


def test_the_seed_counts_only_with_a_sample() -> None:
    combine(request(), request(identity=replace(ONE, seed=5)))
    sampled = replace(ONE, sample=10)
    with pytest.raises(InputError, match=r"--seed 0 \(now 5\)"):
        combine(request(identity=sampled), request(identity=replace(sampled, seed=5)))


def test_other_documents_are_refused() -> None:
    now = request(identity=replace(ONE, datasets={"gsm8k": {"openai/gsm8k": "f" * 40}}))
    with pytest.raises(InputError, match=f"documents of gsm8k from openai/gsm8k at {'a' * 40} .now {'f' * 40}"):
        combine(request(), now)


@pytest.mark.parametrize("key", ["schema", "identity", "settings", "model", "tasks"])
def test_a_damaged_request(key: str) -> None:
    stored = {name: value for name, value in request().items() if name != key}
    for check in (lambda: combine(stored, request()), lambda: adopt_resolved(SETTINGS, stored)):
        with pytest.raises(InputError, match=f"sweep.json has no '{key}': it was edited"):
            check()


def test_unknown_settings_are_kept_and_an_unknown_identity_is_refused() -> None:
    stored = request()
    stored["settings"] = {**stored["settings"], "colour": "blue"}
    assert combine(stored, request())["settings"]["colour"] == "blue"
    stored["identity"] = {**stored["identity"], "prompt_style": "short"}
    with pytest.raises(InputError, match="'prompt_style' in its identity, written by a newer version"):
        combine(stored, request())


def stored_with(source: str, *, model: str = "auto", revision: str = "sha256:x", data: str = "auto") -> dict[str, Any]:
    identity = replace(ONE, model=source.partition("@")[0], model_revision=revision, dtype="bfloat16")
    made = request(replace(SETTINGS, model=model, data=data), identity)
    return {**made, "model": {**made["model"], "source": source}}


def test_auto_is_what_it_was() -> None:
    settings = replace(SETTINGS, model="auto")
    assert adopt_resolved(settings, None) is settings
    adopted = adopt_resolved(settings, stored_with("tiny"))
    assert (adopted.model, adopted.dtype, adopted.data) == ("tiny", "bfloat16", "auto")
    assert adopt_resolved(settings, stored_with("/models/x", model="/models/x", data="bench")).model == "/models/x"
    assert adopt_resolved(settings, stored_with("/models/x", data="bench")).data == "bench"
    assert adopt_resolved(replace(settings, data="hub", dtype="float32"), stored_with("tiny")).data == "hub"
    assert adopt_resolved(replace(settings, address="auto"), stored_with("tiny")).model == "auto", "never on a cluster"


def test_a_hub_model_stays_at_its_commit() -> None:
    commit = "c" * 40
    stored = stored_with("owner/name", model="owner/name", revision=commit)
    for asked in ("auto", "owner/name"):
        assert adopt_resolved(replace(SETTINGS, model=asked), stored).model == f"owner/name@{commit}"
    assert adopt_resolved(replace(SETTINGS, model="owner/name@main"), stored).model == "owner/name@main", (
        "asked for on purpose"
    )
    assert adopt_resolved(replace(SETTINGS, model="owner/other"), stored).model == "owner/other"
    named = stored_with("owner/name@main", model="owner/name@main", revision=commit)
    assert adopt_resolved(replace(SETTINGS, model="owner/name@main"), named).model == f"owner/name@{commit}", (
        "the same command"
    )
