"""Plans for GPUs that are not here, what a plan can show, and what a race would save."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.analysis.accuracy import documents_for_margin
from orchestrator.cli.__main__ import dispatch
from orchestrator.cli.sweep import parse_sweep
from orchestrator.core.system import GPU_PROFILES, format_bytes
from orchestrator.planning.estimate import duration_range, memory_needed, parameters, seconds_needed
from orchestrator.planning.forecast import describe_plan, largest_batch, race_shares, undecidable
from orchestrator.planning.machine import Machine, Nodes
from orchestrator.planning.preflight import prepare
from orchestrator.planning.prepared import PreparedSweep
from orchestrator.planning.settings import SweepSettings
from orchestrator.planning.sweep_record import combine
from sampler.config import FULL_MODEL, KNOWN_CHECKPOINTS, SMALL_MODEL
from sampler.errors import InputError
from tasks.catalog import CATALOG
from tasks.documents import TaskOptions
from tasks.task import published_task

ALL_TASKS = tuple(CATALOG)
SCALE_PAGE, GPU_PAGE = (
    (Path(__file__).parents[1] / "docs" / name).read_text(encoding="utf-8") for name in ("scale.md", "gpu.md")
)


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Any attempt to use the Hub fails, and its cache is empty."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the Hub was used")

    monkeypatch.chdir(tmp_path)
    for target in ("sampler.loading.model_info", "sampler.loading.snapshot_download", "tasks.sources.HfApi"):
        monkeypatch.setattr(target, refuse)


def planned(device: str = "rtx6000", **settings: Any) -> PreparedSweep:
    chosen = SweepSettings(**{"tasks": ("gsm8k",), "model": FULL_MODEL, **settings})
    return prepare(chosen, Machine.planned(GPU_PROFILES[device], chosen))


def line(lines: list[str], word: str) -> str:
    (found,) = [one for one in lines if one.startswith(word)]
    return found


def page_rows() -> dict[str, list[str]]:
    """The cells of the table of GPU-hours in docs/scale.md, by task."""
    table = SCALE_PAGE.partition("## GPU-hours")[2]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\|.*\|$", table, re.M)]
    return {row[0]: row[1:] for row in rows if row[0] in (*ALL_TASKS, "all", "task")}


def test_plans_for_three_devices_agree_with_the_page_on_scaling() -> None:
    page = page_rows()
    devices = page["task"][2:]
    assert devices == ["rtx6000", "a100-80", "h100"]
    for place, device in enumerate(devices):
        lines = describe_plan(planned(device, tasks=ALL_TASKS))
        for name in ALL_TASKS:
            text = line(lines, f"task       {name}:")
            documents, tokens, hours = page[name][0], page[name][1], page[name][2 + place]
            assert f"{documents} of {documents} documents (published number; not loaded)" in text
            assert text.endswith(f", about {hours}"), (device, name)
            assert tokens.partition(" ")[0] == str(CATALOG[name].answer_tokens or "scored")
        assert f"about {page['all'][2 + place]} on one actor, " in line(lines, "time")


def test_a_plan_for_a_gpu_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--tasks", "gsm8k,humaneval", "--model", FULL_MODEL, "--device-profile", "a100-80", "--batch-size", "8"]
    dispatch(["sweep", *flags, "--actors", "8", "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    assert "never been run" in lines[0]
    assert line(lines, "model") == f"model      {FULL_MODEL} (28 layers, bfloat16); 15.2 GB to download"
    assert re.search(
        r"about 18\.1 GB per actor at batch size 8, of 77\.6 GB .*batch size \d+ would fit", line(lines, "mem")
    )
    assert "15.2 GB for the model" in line(lines, "disk")
    assert re.search(r"about .* hours on one actor, .* on 8 actors, a rough estimate", line(lines, "time"))
    assert line(lines, "accuracy").startswith(f"accuracy   {documents_for_margin(5, 6)} documents can show ")
    assert "that less than 5 points are lost" in line(lines, "accuracy")
    assert "gsm8k has 1,319, humaneval has 164" in line(lines, "accuracy")
    assert [one.partition(":")[0] for one in lines if one.startswith("speed")] == [
        "speed      k2_first, k2_middle, k2_last",
        "speed      k3_first, k3_middle, k3_last",
    ]
    assert re.search(r"--race would take about \d+ to \d+ % of the full grid's time", line(lines, "race"))
    assert "164 documents of humaneval are too few" in line(lines, "warning")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--device-profile", "h100"],
            "--device-profile h100 only plans a sweep, for a GPU that is not here: add --dry-run",
        ),
        (["--device-profile", "b52", "--dry-run"], "--device-profile must be one of a100-40, a100-80, h100, "),
        (["--device-profile", "t4", "--dry-run", "--address", "auto"], "--address must not be used together"),
        (["--device-profile", "t4", "--dry-run", "--gpus-per-actor", "0"], "omit --gpus-per-actor 0"),
    ],
)
def test_profiles_that_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        parse_sweep(["--tasks", "gsm8k", *flags])


def test_what_does_not_fit_is_refused_as_in_a_run() -> None:
    with pytest.raises(InputError, match=r"each actor needs about 15\.9 GB of memory, .*T4 with 16 GB"):
        planned("t4")
    with pytest.raises(InputError, match="bfloat16"):
        planned("rtx6000", dtype="bfloat16")
    assert planned("t4", model=SMALL_MODEL).identity.dtype == "float16"


def test_an_unknown_model_needs_its_files(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"is a file; .* shapes are known without files of Efficient-Large-Model"):
        planned(model=str(tmp_path / "file"))


def test_a_run_without_the_files_points_to_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise InputError("the model is not here")

    monkeypatch.setattr("orchestrator.planning.preflight.find_model", unreachable)
    machine = Machine(nodes=(Nodes(resources={"CPU": 2}),))
    with pytest.raises(InputError, match=r"not here \(--dry-run --device-profile a100-80 plans a sweep of it"):
        prepare(SweepSettings(tasks=("gsm8k",), model=FULL_MODEL, data="bundled"), machine)


def test_shapes_that_ship_with_the_project() -> None:
    assert {name.rpartition("_")[2]: parameters(config) for name, config in KNOWN_CHECKPOINTS.items()} == {
        "7B": 7_615_616_512,
        "1.5B": 1_543_714_304,
    }


def test_published_sizes_are_those_of_the_catalog() -> None:
    for spec in CATALOG.values():
        assert sum(spec.published_sizes.values()) == spec.document_count
    counts = {}
    for name in ("mmlu", "minerva_math_geometry", "gpqa_diamond_n_shot", "gpqa"):
        task = published_task(name, TaskOptions(limit=100))
        assert task is not None
        counts[name] = len(task.documents)
    assert counts == {"mmlu": 5700, "minerva_math_geometry": 100, "gpqa_diamond_n_shot": 100, "gpqa": 100}
    sampled = published_task("mmlu", TaskOptions(sample=500))
    assert sampled is not None
    assert len(sampled.documents) == 500
    assert published_task("arc_easy", TaskOptions()) is None


def test_a_race_saves_as_much_as_its_simulations_on_the_page_on_statistics() -> None:
    """4 % of the time at a speed-up of 1.0, 36 % without a loss, 44 % with a loss near the margin, on GSM8K's size."""
    nothing, everything, near = race_shares(planned()).values()
    assert 0.02 < nothing < 0.10
    assert 0.05 < everything < 0.6
    assert 0.1 < near < 0.8
    few = race_shares(planned(limit=8))
    assert min(few.values()) > 0.5, "too few shards for a decision"
    assert race_shares(planned(repeats=2)) == {}
    assert race_shares(planned(policies=("k2_first", "k2_last"))) == {}


def test_plans_that_cannot_be_decided() -> None:
    assert undecidable(planned()) == []
    (few,) = undecidable(planned(limit=20))
    assert few.startswith("20 documents of gsm8k are too few to show that less than 5 points are lost (about 4")
    (without,) = undecidable(planned(policies=("k2_first", "k3_last")))
    assert "no policy is k1" in without
    needed = documents_for_margin(5.0, 6)
    assert needed is not None
    assert undecidable(planned(limit=needed)) == []
    assert len(undecidable(planned(limit=needed - 1))) == 1
    (slow,) = undecidable(planned(speedup=1.3))
    assert slow == "k2_first, k2_middle, k2_last cannot exceed the declared speed-up of 1.3× even in the ideal case"
    assert undecidable(planned(tasks=("mmlu",), policies=("k1", "k2_middle"))) == [], "scored: no speed to measure"
    assert undecidable(planned(policies=("k1", "k1_last"))) == []
    (once,) = undecidable(planned(policies=("k1", "k2_middle"), replicate=False))
    assert once.startswith("k=1 runs only once (k1), ")
    assert once.endswith(": add k1_first")
    assert undecidable(planned(policies=("k1", "k2_middle"), replicate=False, repeats=2)) == []


@pytest.mark.parametrize(
    ("policies", "planned_policies"),
    [
        (("k1", "k2_middle"), ("k1", "k1_first", "k2_middle")),
        (("k2_middle", "k1_first", "stale=2"), ("k2_middle", "k1_first", "k1_last", "stale=2")),
        (("k1_first", "k1_middle", "k2_middle"), ("k1_first", "k1_middle", "k2_middle")),
        (("k1",), ("k1",)),
        (("k2_first", "k2_last"), ("k2_first", "k2_last")),
    ],
)
def test_k1_runs_twice_if_it_is_named_once(policies: tuple[str, ...], planned_policies: tuple[str, ...]) -> None:
    prepared = planned(policies=policies)
    assert prepared.settings.policies == planned_policies == tuple(prepared.record()["settings"]["policies"])
    added = set(planned_policies) - set(policies)
    assert [notice.partition(":")[0] for notice in prepared.notices] == [f"added {name}" for name in added]
    for changes in ({"replicate": False}, {"repeats": 2}, {"tasks": ("mmlu",), "policies": ("k1", "k2_middle")}):
        chosen = planned(**{"policies": policies, **changes})
        assert chosen.settings.policies == changes.get("policies", policies)


def test_an_existing_sweep_keeps_its_policies() -> None:
    """One with a single k=1 gets no other; one that began with a replicate continues both."""
    chosen = SweepSettings(tasks=("gsm8k",), model=FULL_MODEL, policies=("k1", "k2_middle"))
    machine = Machine.planned(GPU_PROFILES["l4"], chosen)
    single = combine(None, prepare(replace(chosen, replicate=False), machine).record())
    again = prepare(chosen, machine, single)
    assert (again.settings.policies, again.notices) == (("k1", "k2_middle"), ())
    assert combine(single, again.record())["settings"]["policies"] == ["k1", "k2_middle"]
    twice = combine(None, prepare(chosen, machine).record())
    again = prepare(chosen, machine, twice)
    assert (again.settings.policies, again.notices) == (("k1", "k1_first", "k2_middle"), ())
    extended = prepare(replace(chosen, policies=("k1", "k3_last")), machine, twice)
    assert combine(twice, extended.record())["settings"]["policies"] == ["k1", "k1_first", "k2_middle", "k3_last"]


def test_the_page_on_gpus_has_the_figures_of_the_dry_run() -> None:
    rows = [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in re.findall(r"^\|.*\|$", GPU_PAGE, re.M)]
    by_name = {row[0]: row[1:] for row in rows}
    assert by_name.keys() >= GPU_PROFILES.keys()
    for name, profile in GPU_PROFILES.items():
        label, dtype, largest, *hours = by_name[name]
        assert label == profile.label
        if largest == "too small":
            with pytest.raises(InputError, match="each actor needs about"):
                planned(name)
            continue
        prepared = planned(name, tasks=("gsm8k", "minerva_math", "mmlu"))
        needed = seconds_needed(
            prepared.work(), {}, config=prepared.files.config, dtype=prepared.identity.dtype, device=profile
        )
        assert hours == [duration_range(task.least, task.most) for task in needed.values()]
        assert dtype == prepared.identity.dtype
        assert int(largest) == largest_batch(prepared)
    for model in KNOWN_CHECKPOINTS:
        sizes = [memory_needed(KNOWN_CHECKPOINTS[model], "bfloat16", batch_size=size) for size in (1, 8, 32, 64)]
        assert by_name[model.partition("/")[2]] == [format_bytes(size) for size in sizes]
