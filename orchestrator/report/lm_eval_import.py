"""Imports results of other engines: samples that lm-eval logged become configurations of a sweep.

An imported sweep is a directory like any other. Its first configuration is the baseline (k=1 in tables and sentences).
Every other one must have the same documents and prompts. Rows have no counters. They have times only if each sample
states `seconds` and `tokens`; else the task's kind is UNTIMED, and accuracy alone is judged.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from orchestrator.analysis.gates import IMPORTED, UNTIMED
from orchestrator.analysis.pipeline import POOLED
from orchestrator.analysis.verdicts import DEFAULT_MARGIN, DEFAULT_SPEEDUP
from orchestrator.core.configuration import DECODE_SETTINGS, Configuration, default_of
from orchestrator.core.system import code_version, package_versions
from orchestrator.core.totals import trial_sums
from orchestrator.core.trial import Trial
from orchestrator.core.untrusted import name_problem, shown
from orchestrator.report.examples import first_difference
from orchestrator.report.lm_eval_samples import ImportedTask, Json, Sample, read_tasks
from orchestrator.report.sweeps import open_sweep
from orchestrator.store import Store, StoreWriter
from orchestrator.store.schema import DOCUMENTS, ROWS
from orchestrator.store.trial_files import TOTALS_KEY
from sampler.errors import InputError, counted
from sampler.records import GENERATE, LOGLIKELIHOOD

SHARD_DOCUMENTS = 50  # documents of a trial; speeds are compared trial by trial
CONTEXT_CHARACTERS = 20  # shown on each side of a difference
COUNTERS = (
    *("passes_prefill", "passes_full", "passes_small", "passes_commit", "layers_computed", "layers_reused"),
    *("layer_positions", "prefill_tokens", "eligible", "replayed"),
)


def import_lm_eval(
    files: Sequence[Path],
    folder: Path,
    label: str,
    *,
    against: Path | None = None,
    metric: str | None = None,
    margin: float = DEFAULT_MARGIN,
    speedup: float = DEFAULT_SPEEDUP,
) -> list[str]:
    """Adds a configuration to an imported sweep, which is created if missing; returns lines to print.

    `against` is a sweep of this project whose k=1 becomes the baseline. The first import declares `margin` and
    `speedup`. All files are checked before anything is written.
    """
    if (problem := name_problem(label)) is not None:
        raise InputError(f"--as must be {problem} (got {shown(label)})")
    tasks = read_tasks(files, metric)
    stored = Store(folder).read_sweep_record()
    if stored is not None and IMPORTED not in stored:
        raise InputError(f"{folder} is a sweep that ran here, not an imported one; choose another --name")
    if stored is not None and against is not None:
        raise InputError(f"{folder} already has a baseline, {stored['settings']['policies'][0]}; omit --against")
    if stored is not None and _is_complete(Store(folder), stored, label):
        raise InputError(f"{folder} already has a configuration {label}; choose another --as")
    own = None if against is None else _own_baseline(against, tasks)
    if own is not None and own[0] == label:
        raise InputError(f"--as must differ from the baseline, {label}")
    if stored is not None:
        _check_same_tasks(folder, stored, tasks)
    record = _record(folder, stored, tasks, label, files, own)
    if stored is None:
        record |= {"margin": margin, "speedup": speedup, "pooled": POOLED}
    with StoreWriter(folder) as writer:
        writer.write_sweep_record(record)
        if stored is None:
            for task in tasks.values():
                writer.write_documents(task.name, _documents(task))
        for task in tasks.values():
            if own is not None:
                _write_rows(writer, record, task, own[0], own[1][task.name])
            _write_rows(writer, record, task, label, [_row(task, sample) for sample in task.samples.values()])
    return list(_notices(tasks, label, record))


# Pairing


def _is_complete(store: Store, record: Json, label: str) -> bool:
    """Whether the configuration was imported completely; an interrupted import may be repeated."""
    if label not in record["settings"]["policies"]:
        return False
    rows = pc.sum(pc.equal(store.rows(columns=["policy"])["policy"], label)).as_py() or 0
    return bool(rows >= sum(task["documents"] for task in record["tasks"].values()))


def _check_same_tasks(folder: Path, record: Json, tasks: Mapping[str, ImportedTask]) -> None:
    if tasks.keys() != record["tasks"].keys():
        raise InputError(
            f"{folder} has samples of {', '.join(record['tasks'])}, but the files have samples of {', '.join(tasks)}; "
            "import the same tasks"
        )
    for task in tasks.values():
        entry = record["tasks"][task.name]
        _check_metric(task, entry["primary"], folder)
        stored = {row["doc_id"]: row for row in Store(folder).documents(task.name).to_pylist()}
        _check_same_documents(task, stored, folder, whole_prompt=True)
        _check_fewshot(task, entry.get("fewshot"), folder)


def _check_same_documents(task: ImportedTask, stored: Mapping[str, Json], folder: Path, *, whole_prompt: bool) -> None:
    missing = [doc_id for doc_id in task.samples if doc_id not in stored]
    missing += [doc_id for doc_id in stored if doc_id not in task.samples] if whole_prompt else []
    if missing:
        has = f"{folder} has" if missing[0] in stored else "the imported files have"
        raise InputError(f"{task.name}: documents differ: only {has} {missing[0]}")
    for sample in task.samples.values():
        other = stored[sample.doc_id]
        if sample.doc_hash != other["doc_hash"]:
            raise InputError(
                f"{task.name}: the document {sample.doc_id} differs: {folder} asks {shown(other['question'])}, "
                f"the files ask {shown(sample.prompt)}"
            )
        prompt, expected = sample.prompt, other["question"]
        inside = prompt == expected if whole_prompt else any(form in prompt for form in (expected, _escaped(expected)))
        if not inside:
            raise InputError(
                f"{task.name}: the prompt of {sample.doc_id} differs: {_difference(expected, prompt, folder)}"
            )


def _escaped(text: str) -> str:
    """The text as it appears inside chat messages in JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _difference(stored: str, imported: str, folder: Path) -> str:
    """Both texts around the first character that differs."""
    first = first_difference(stored, imported)
    assert first is not None
    start = max(0, first - CONTEXT_CHARACTERS)
    parts = (text[start : start + 2 * CONTEXT_CHARACTERS] for text in (stored, imported))
    ours, theirs = map(repr, parts)
    return f"from character {start + 1}, {folder} has {ours}, the files have {theirs}"


def _check_metric(task: ImportedTask, stored: str, folder: Path) -> None:
    if stored != task.primary:
        raise InputError(
            f"{task.name}: {folder} compares {stored}, but {task.primary} would be imported; choose with --metric"
        )


def _check_fewshot(task: ImportedTask, stored: int | None, folder: Path) -> None:
    if None not in (stored, task.fewshot) and stored != task.fewshot:
        raise InputError(f"{task.name}: prompts differ: {folder} is {stored}-shot, the files are {task.fewshot}-shot")


def _own_baseline(against: Path, tasks: Mapping[str, ImportedTask]) -> tuple[str, dict[str, list[Json]]]:
    """The first policy at k=1 of a sweep that ran here, and its rows of the imported documents."""
    store, record = open_sweep(against)
    if IMPORTED in record:
        raise InputError(f"{against} is imported itself; give its --name instead of --against")
    rows = store.rows().filter((pc.field("k") == 1) & (pc.field("repeat") == 0))
    if not rows.num_rows:
        raise InputError(f"{against} has no rows at k=1 to compare with")
    policy = next(name for name in record["settings"]["policies"] if name in set(rows["policy"].to_pylist()))
    rows_by_task: dict[str, list[Json]] = {}
    for task in tasks.values():
        if task.name not in record["tasks"]:
            raise InputError(f"{against} has no task {task.name}; it has {', '.join(record['tasks'])}")
        stored = {row["doc_id"]: row for row in store.documents(task.name).to_pylist()}
        _check_same_documents(task, stored, against, whole_prompt=False)
        _check_fewshot(task, record["tasks"][task.name].get("fewshot"), against)
        own = rows.filter((pc.field("task") == task.name) & (pc.field("policy") == policy)).to_pylist()
        by_document = {row["doc_id"]: row for row in reversed(own)}
        absent = [doc_id for doc_id in task.samples if doc_id not in by_document]
        if absent:
            raise InputError(f"{task.name}: {against} has no row of {policy} for {absent[0]}; let the sweep finish")
        _check_metric(task, record["tasks"][task.name]["primary"], against)
        rows_by_task[task.name] = [
            {name: by_document[doc_id][name] for name in ("correct", "metrics", "text", "token_ids", "scores")}
            for doc_id in task.samples
        ]
    return policy, rows_by_task


# Writing


def _record(
    folder: Path,
    stored: Json | None,
    tasks: Mapping[str, ImportedTask],
    label: str,
    files: Sequence[Path],
    own: tuple[str, dict[str, list[Json]]] | None,
) -> Json:
    """sweep.json: that of a new sweep, or `stored` with one more configuration."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    command = {
        "argv": ["import", "lm-eval", "--as", label, *(file.name for file in files)],
        "at": now,
        "code": code_version(),
        "packages": package_versions(),
    }
    before = {} if stored is None else stored["tasks"]
    entries = {
        task.name: {
            "kind": _kind(task, before.get(task.name, {}).get("kind"), own is not None),
            "primary": task.primary,
            "documents": len(task.samples),
            "fewshot": task.fewshot if stored is None else before[task.name].get("fewshot"),
            "source": IMPORTED,
        }
        for task in tasks.values()
    }
    if stored is not None:
        policies = [*stored["settings"]["policies"], *([label] if label not in stored["settings"]["policies"] else [])]
        return {
            **stored,
            "settings": {**stored["settings"], "policies": policies},
            "tasks": entries,
            IMPORTED: {**stored[IMPORTED], label: [file.name for file in files]},
            "commands": [*stored.get("commands", ()), command],
        }
    defaults = {name: [default_of(name)] for name in DECODE_SETTINGS}
    sources = {label: [file.name for file in files]}
    return {
        "sweep": folder.name,
        "created": now,
        "identity": {"model": IMPORTED, "data": f"{IMPORTED}: {folder.name}", "datasets": {}},
        "settings": {
            "tasks": list(tasks),
            "policies": [*([own[0]] if own is not None else []), label],
            **defaults,
            "repeats": 1,
            "shard_size": SHARD_DOCUMENTS,
        },
        "model": {"source": "results imported from lm-eval"},
        "tasks": entries,
        IMPORTED: {**({own[0]: ["rows of a sweep"]} if own is not None else {}), **sources},
        "commands": [command],
    }


def _kind(task: ImportedTask, stored: str | None, with_own_rows: bool) -> str:
    """The kind of a task that has the kind `stored` so far. UNTIMED unless all configurations have times to compare.

    Times of a sweep's own rows are measured differently, so they are not compared with imported ones.
    """
    if not task.generates:
        return LOGLIKELIHOOD
    return GENERATE if task.timed and stored in (None, GENERATE) and not with_own_rows else UNTIMED


def _documents(task: ImportedTask) -> pa.Table:
    rows = [
        {
            "doc_id": sample.doc_id,
            "subtask": sample.subtask,
            "doc_hash": sample.doc_hash,
            "shard": index // SHARD_DOCUMENTS,
            "question": sample.prompt,
            "choices": sample.choices,
            "gold": sample.gold,
        }
        for index, sample in enumerate(task.samples.values())
    ]
    return pa.Table.from_pylist(rows, schema=DOCUMENTS)


def _row(task: ImportedTask, sample: Sample) -> Json:
    value = sample.metrics[task.primary]
    # Answers are compared by their tokens, which are unknown, so a hash of the text stands in for them.
    token_ids = [] if sample.text is None else [int(hashlib.sha256(sample.text.encode()).hexdigest()[:7], 16)]
    seconds, tokens = sample.time or (0.0, 0)
    return {
        "correct": bool(value) if value in (0, 1) else None,
        "metrics": json.dumps(sample.metrics),
        "text": sample.text,
        "token_ids": token_ids,
        "scores": list(sample.scores),
        "tokens": tokens,
        "seconds": seconds,
        "batch_seconds": seconds,
    }


def _write_rows(writer: StoreWriter, record: Json, task: ImportedTask, label: str, values: Iterable[Json]) -> None:
    """The rows of one configuration, in trials of SHARD_DOCUMENTS."""
    baseline = record["settings"]["policies"][0] == label
    now = datetime.now(UTC)
    pairs = list(zip(task.samples.values(), values, strict=True))
    for shard, start in enumerate(range(0, len(pairs), SHARD_DOCUMENTS)):
        digest = hashlib.sha256(json.dumps([record["sweep"], label, task.name, shard]).encode()).hexdigest()
        trial = Trial(
            trial_id=digest[:16], task=task.name, configuration=Configuration(policy=label), repeat=0, shard=shard
        )
        common = {
            **dict.fromkeys(COUNTERS, 0),
            **trial.as_dict(),
            "sweep": record["sweep"],
            "k": 1 if baseline else None,
            "layers": [],
            "batch_size": 1,
            "dtype": "unknown",
            "prompt_tokens": 0,
            "tokens": 0,
            "seconds": 0.0,
            "batch_seconds": 0.0,
            "finish": "stop" if task.generates else None,
            **dict.fromkeys(("actor", "node", "device"), IMPORTED),
            "calibration": 1.0 if task.timed and task.generates else math.nan,
            "started_at": now,
        }
        part = pairs[start : start + SHARD_DOCUMENTS]
        attempt = writer.begin(trial.as_dict(), {"actor": IMPORTED, "code": record["commands"][-1]["code"]})
        rows = [
            {
                **common,
                **value,
                **{name: getattr(sample, name) for name in ("doc_id", "subtask", "doc_hash")},
                "batch_id": index,
                "attempt": attempt,
            }
            for index, (sample, value) in enumerate(part)
        ]
        table = pa.Table.from_pylist(rows, schema=ROWS)
        writer.append(trial.trial_id, attempt, table.to_batches()[0])
        writer.finish(trial.trial_id, {TOTALS_KEY: trial_sums(table).as_json()}, [one.doc_id for one, _ in part])


def _notices(tasks: Mapping[str, ImportedTask], label: str, record: Json) -> Iterator[str]:
    baseline = record["settings"]["policies"][0]
    for task in tasks.values():
        scores = [float(sample.metrics[task.primary]) for sample in task.samples.values()]
        mean = f"{task.primary} {100 * sum(scores) / len(scores):.2f} % on {counted(len(scores), 'document')}"
        untimed = record["tasks"][task.name]["kind"] == UNTIMED
        yield f"{task.name}: {label} has {mean}{'; no times to compare' if untimed else ''}"
    if baseline == label:
        yield f"{label} is the baseline; import another configuration with the same --name to compare with it"
