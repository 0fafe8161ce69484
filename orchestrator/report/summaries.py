"""One summary.json per configuration: the keys of the original experiment, and more."""

from collections.abc import Iterator
from typing import Any

from orchestrator.analysis import as_json
from orchestrator.analysis.results import ConfigurationResult, TaskResult
from orchestrator.analysis.trial_facts import TrialFiles, trial_provenance, trials_by_configuration
from orchestrator.core.configuration import DECODE_SETTINGS, varying_settings
from orchestrator.report.section import ConfigurationView, Section

RENAMED_SETTINGS = {"block_cache": "use_block_cache"}  # as the original experiment wrote them


def configuration_summaries(section: Section) -> Iterator[tuple[str, dict[str, Any]]]:
    """Directory name (task[_limit_N]/configuration) and content."""
    limit = section.request.get("settings", {}).get("limit")
    trials = trials_by_configuration(section.trials)
    for task_view in section.tasks:
        task = task_view.task
        folder = task.task + (f"_limit_{limit}" if limit else "")
        varying = varying_settings(result.configuration for result in task.configurations)
        for view in task_view.configurations:
            configuration = view.result.configuration
            own_trials = trials.get((task.task, configuration), {})
            yield f"{folder}/{configuration.slug(varying)}", _summary(section, task, view, own_trials)


def _summary(section: Section, task: TaskResult, view: ConfigurationView, trials: TrialFiles) -> dict[str, Any]:
    result = view.result
    own, speed = result.resolved, result.throughput
    identity = section.request["identity"]
    found = trial_provenance(trials)
    rate = speed.tokens_per_second
    return {
        "task": task.task,
        "config": own.policy,
        "timestamp": view.counters.ended.isoformat(),
        "accuracy": result.accuracy.value,
        "throughput": {
            "tokens_generated": speed.tokens,
            "total_time_s": speed.seconds,
            "tokens_per_s": None if rate is None else rate.value,
        },
        "gpu_info": [{"name": device.name, **dict(device.facts)} for device in found.devices],
        "git": {"versions": list(found.codes)},
        "environment": {
            name: versions[0] if len(versions) == 1 else list(versions) for name, versions in found.packages
        },
        "model_args": {
            "model": identity.get("model"),
            "revision": identity.get("model_revision"),
            "dtype": identity.get("dtype"),
            "reuse_k": own.k,
            "layer_subset": own.subset,
            "mode": own.mode,
            **{RENAMED_SETTINGS.get(name, name): getattr(own.configuration, name) for name in DECODE_SETTINGS},
        },
        "eval_params": {
            "limit": section.request.get("settings", {}).get("limit"),
            "num_fewshot": section.request["tasks"].get(task.task, {}).get("fewshot"),
            "batch_size": identity.get("batch_size"),
            "max_new_tokens": identity.get("max_new_tokens"),
            "chat_template": identity.get("chat_template"),
            "primary_metric": task.primary,
            "documents": result.documents,
            "documents_wanted": result.wanted,
            "repeats": result.repeats,
        },
        "layers": list(own.layers),
        "intervals": _intervals(result),
        "verdict": as_json(result.comparison.verdict) if result.comparison else None,
        "counters": {"rows": view.counters.rows, **view.counters.sums},
        "flops_per_token": view.flops_per_token,
        "peak_memory_bytes": view.peak_memory_bytes,
        "gates": _gates(section, trials),
    }


def _intervals(result: ConfigurationResult) -> dict[str, Any]:
    found: dict[str, Any] = {
        "accuracy": result.accuracy,
        "tokens_per_s": result.throughput.tokens_per_second,
        "seconds_per_document": result.throughput.seconds_per_document,
    }
    comparison = result.comparison
    if comparison is not None:
        found["accuracy_difference_points"] = comparison.difference.points
        found["p_mcnemar"], found["p_holm"] = comparison.difference.p_value, comparison.difference.p_holm
        found["speedup"] = None if comparison.speedup is None else comparison.speedup.tokens
        found["speedup_documents"] = None if comparison.speedup is None else comparison.speedup.seconds
    return {name: as_json(value) for name, value in found.items()}


def _gates(section: Section, trials: TrialFiles) -> list[dict[str, Any]]:
    """Gates that passed, and those that failed for this configuration's trials."""
    return [
        {"gate": finding.gate, "ok": finding.ok, "sentence": finding.sentence}
        for finding in section.analysis.gates
        if finding.ok or not finding.trials or trials.keys() & set(finding.trials)
    ]
