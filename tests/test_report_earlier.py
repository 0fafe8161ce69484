"""The earlier experiment's figures, imported and looked at."""

import json
from pathlib import Path

import pytest

from orchestrator.report.summaries import (
    Summary,
    compare_by_task,
    parse_summary,
    read_earlier_experiment,
    read_summary,
)
from sampler.errors import InputError

SEEDS = Path(__file__).parent.parent / "examples" / "seed-results"


def test_the_gsm8k_table_is_reproduced() -> None:
    by_task = {(task.task, task.limit): task for task in read_earlier_experiment(SEEDS).tasks}
    assert set(by_task) == {("gsm8k", None), ("mmlu", None), ("minerva_math", 10)}
    rows = {row.summary.config: row for row in by_task["gsm8k", None].rows}
    assert list(rows) == [f"k{k}_{subset}" for k in (1, 2, 3) for subset in ("first", "middle", "last")]
    for config, row in rows.items():
        assert row.drop is not None
        assert row.summary.reported_drop is not None
        assert row.drop == pytest.approx(row.summary.reported_drop, abs=0.1), config
    assert [rows[f"k2_{subset}"].summary.reported_drop for subset in ("first", "middle", "last")] == [-6.7, -6.8, -6.6]
    assert rows["k2_first"].drop == pytest.approx(-6.75)
    assert rows["k3_first"].drop == pytest.approx(-13.27)
    assert rows["k3_first"].summary.reported_drop == -13.2
    assert rows["k2_last"].speed_ratio == pytest.approx(40.51 / 49.54)


def test_the_anomaly_of_k1_first_is_called_out() -> None:
    gsm8k = next(task for task in read_earlier_experiment(SEEDS).tasks if task.task == "gsm8k")
    assert len(gsm8k.anomalies) == 1
    assert (
        "k1_first ran at 22.75 tokens/s, 2.2 times slower than k1_middle (49.54) and k1_last (49.63)"
        in (gsm8k.anomalies[0])
    )


def test_nine_identical_accuracies_are_called_out() -> None:
    mmlu = next(task for task in read_earlier_experiment(SEEDS).tasks if task.task == "mmlu")
    assert mmlu.anomalies == (
        "All 9 configurations have exactly the same accuracy (66.53%): the policy probably had no effect on the model.",
    )


def test_sound_twins_are_not_called_out() -> None:
    minerva = next(task for task in read_earlier_experiment(SEEDS).tasks if task.task == "minerva_math")
    assert minerva.anomalies == ()


def test_figures_hang_together() -> None:
    """tokens ÷ seconds is tokens/s, within the rounding of the hours that were stated."""
    for path in sorted((SEEDS / "gsm8k").rglob("summary.json")):
        one = read_summary(path)
        if one.tokens is not None:
            assert one.seconds is not None
            assert one.tokens / one.seconds == pytest.approx(one.tokens_per_second, rel=0.003)


def test_percent_and_named_limits_are_understood() -> None:
    one = parse_summary({"task": "mmlu_limit_10", "config": {"name": "k2_last"}, "accuracy": 66.53}, "x")
    assert (one.task, one.limit, one.config, one.k) == ("mmlu", 10, "k2_last", 2)
    assert one.accuracy == pytest.approx(0.6653)


def test_k1_that_disagrees_is_called_out() -> None:
    replicates = [
        Summary(
            task="t",
            limit=None,
            config=name,
            k=1,
            accuracy=accuracy,
            tokens=None,
            seconds=None,
            tokens_per_second=None,
            timestamp="",
            reported_drop=None,
        )
        for name, accuracy in (("k1_first", 0.5), ("k1_last", 0.6))
    ]
    assert "differ in accuracy" in compare_by_task(replicates)[0].anomalies[0]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("[]", "JSON object"),
        ("{", "not valid JSON"),
        (json.dumps({"task": "a", "config": "k1"}), "lacks 'accuracy'"),
        (json.dumps({"task": "a", "config": "k1", "accuracy": "high"}), "must be a number"),
        (json.dumps({"task": "a", "config": "k1", "accuracy": -1}), "between 0 and 1"),
        ('{"task": "a", "config": "k1", "accuracy": NaN}', "must be a number"),
        ('{"task": "a", "config": "k1", "accuracy": 1, "throughput": [1]}', "throughput must be a JSON object"),
        ('{"task": "a", "config": "k1", "accuracy": 1, "throughput": {"tokens_per_s": -3}}', "must not be negative"),
        ('{"task": "a", "config": "k1", "accuracy": 1, "throughput": {"tokens_generated": 1e400}}', "must be a number"),
        ('{"task": "a", "config": "k1", "accuracy": 1, "eval_params": "none"}', "eval_params must be a JSON object"),
        ('{"task": "a", "config": "k1", "accuracy": 1, "eval_params": {"limit": NaN}}', "must be a number"),
        (f'{{"task": "a", "config": "k1", "accuracy": 1{"0" * 400}}}', "must be a number"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: str, text: str) -> None:
    (tmp_path / "summary.json").write_text(content)
    with pytest.raises(InputError, match=text):
        read_earlier_experiment(tmp_path)


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"contains no summary\.json"):
        read_earlier_experiment(tmp_path)
    with pytest.raises(InputError, match="is not a directory"):
        read_earlier_experiment(tmp_path / "nowhere")
