"""One summary.json for each configuration: the experiment's keys, and what it lacked. Knows no files."""

from collections.abc import Iterator
from typing import Any

from orchestrator.analysis import as_json
from orchestrator.analysis.explain import flops_per_token
from orchestrator.analysis.results import ConfigurationResult, TaskResult
from orchestrator.analysis.trial_facts import CounterSums, TrialFiles, trial_provenance, trials_by_configuration
from orchestrator.report.section import Section

SHORT = {"threshold": "t{:g}", "small_block": "b{}", "block_cache": "cache-{}"}


def summaries(section: Section) -> dict[str, dict[str, Any]]:
    """By folder name: task[_limit_N]/policy[_varying settings]."""
    return dict(_all(section))


def _all(section: Section) -> Iterator[tuple[str, dict[str, Any]]]:
    limit = section.request.get("settings", {}).get("limit")
    trials = trials_by_configuration(section.trials)
    for view in section.tasks:
        task = view.task
        folder = task.task + (f"_limit_{limit}" if limit else "")
        varying = _varying(task)
        for result in task.configurations:
            own = trials.get((task.task, result.configuration), {})
            yield f"{folder}/{_name(result, varying)}", _summary(section, task, result, own)


def _varying(task: TaskResult) -> list[str]:
    return [axis for axis in SHORT if len({getattr(r.configuration, axis) for r in task.configurations}) > 1]


def _name(result: ConfigurationResult, varying: list[str]) -> str:
    own = result.configuration
    shown = {axis: getattr(own, axis) for axis in varying}
    if "block_cache" in shown:
        shown["block_cache"] = "on" if shown["block_cache"] else "off"
    return "_".join([own.policy, *(SHORT[axis].format(value) for axis, value in shown.items())])


def _summary(section: Section, task: TaskResult, result: ConfigurationResult, trials: TrialFiles) -> dict[str, Any]:
    own, speed = result.configuration, result.throughput
    counted = section.totals[task.task, own]
    identity = section.request["identity"]
    made = trial_provenance(trials)
    rate = speed.tokens_per_second
    return {
        "task": task.task,
        "config": own.policy,
        "timestamp": counted.ended.isoformat(),
        "accuracy": result.accuracy.value,
        "throughput": {
            "tokens_generated": speed.tokens,
            "total_time_s": speed.seconds,
            "tokens_per_s": None if rate is None else rate.value,
        },
        "gpu_info": [{"name": device.name, **dict(device.facts)} for device in made.devices],
        "git": {"versions": list(made.codes)},
        "environment": {
            name: versions[0] if len(versions) == 1 else list(versions) for name, versions in made.packages
        },
        "model_args": {
            "model": identity.get("model"),
            "revision": identity.get("model_revision"),
            "dtype": identity.get("dtype"),
            "reuse_k": result.resolved.k,
            "layer_subset": result.resolved.subset,
            "mode": result.resolved.mode,
            "threshold": own.threshold,
            "small_block": own.small_block,
            "use_block_cache": own.block_cache,
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
        "layers": list(result.resolved.layers),
        "intervals": _intervals(result),
        "verdict": as_json(result.comparison.verdict) if result.comparison else None,
        "counters": _counters(counted),
        "flops_per_token": flops_per_token(speed.positions_per_token, section.request.get("model", {})),
        "peak_memory_bytes": section.memory.get((task.task, own)),
        "gates": _gates(section, trials),
    }


def _intervals(result: ConfigurationResult) -> dict[str, Any]:
    found: dict[str, Any] = {
        "accuracy": result.accuracy,
        "tokens_per_s": result.throughput.tokens_per_second,
        "seconds_per_document": result.throughput.seconds_per_document,
    }
    compared = result.comparison
    if compared is not None:
        found["accuracy_difference_points"] = compared.difference.points
        found["p_mcnemar"], found["p_holm"] = compared.difference.p_value, compared.difference.p_holm
        found["speedup"] = None if compared.speedup is None else compared.speedup.tokens
        found["speedup_documents"] = None if compared.speedup is None else compared.speedup.seconds
    return {name: as_json(value) for name, value in found.items()}


def _counters(counted: CounterSums) -> dict[str, Any]:
    return {"rows": counted.rows, **counted.sums}


def _gates(section: Section, trials: TrialFiles) -> list[dict[str, Any]]:
    """Those that held, and those that failed for this configuration's trials."""
    return [
        {"gate": finding.gate, "ok": finding.ok, "sentence": finding.sentence}
        for finding in section.analysis.gates
        if finding.ok or not finding.trials or trials.keys() & set(finding.trials)
    ]
