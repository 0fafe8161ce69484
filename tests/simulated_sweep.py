"""Writes the folder of a sweep that never ran, through the store's own writer: nine configurations, three tasks.

Accuracy, answers, lengths, passes and times follow from a few stated chances, so that a report has something to show.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from simulated_answers import SCRIPTS, TAILS, Pool, options_pool, reasoning_pool

from orchestrator.core.totals import Sums
from orchestrator.store import StoreWriter
from orchestrator.store.compaction import COMPACTED_FOLDER, FULL_ROWS, encode_compacted
from orchestrator.store.files import Disk
from orchestrator.store.schema import DOCUMENTS, ROWS
from orchestrator.store.trial_files import TOTALS_KEY, new_trial_record
from sampler.policy import ReusePolicy
from tasks.catalog import MMLU_SUBJECTS

NINE = tuple(f"k{k}_{place}" for k in (1, 2, 3) for place in ("first", "middle", "last"))
SUBJECTS = ("algebra", "counting_and_prob", "geometry", "intermediate_algebra", "num_theory", "prealgebra", "precalc")
SUBTASKS = {
    "gsm8k": ["gsm8k"],
    "minerva_math": [f"minerva_math_{subject}" for subject in SUBJECTS],
    "mmlu": [f"mmlu_{subject}" for subject in MMLU_SUBJECTS],
}
PRIMARY = {"gsm8k": "exact_match,flexible-extract", "minerva_math": "math_verify", "mmlu": "acc"}
RIGHT = {"gsm8k": 0.80, "minerva_math": 0.55, "mmlu": 0.66}  # at k=1
LOST = {1: 0.0, 2: 0.06, 3: 0.16}  # of the right ones, by k
WON = {1: 0.0, 2: 0.04, 3: 0.06}  # of the wrong ones
CHANGED = {1: 0.0, 2: 0.25, 3: 0.5}  # answers that differ and are as right as before
BEGAN = datetime(2026, 3, 2, 9, 0, tzinfo=UTC)
DEVICE = {"name": "Simulated GPU", "memory": 24 * 2**30, "driver": "0.0"}
CODE = {"version": "0.1.0", "commit": "5" * 40, "dirty": False}
PACKAGES = {"python": "3.11.7", "torch": "2.13.0", "ray": "2.60.0", "lm_eval": "0.4.13"}


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What to simulate. `documents` counts those of each task; a task's subjects take turns."""

    documents: Mapping[str, int] = field(default_factory=lambda: {"gsm8k": 150, "minerva_math": 140, "mmlu": 228})
    policies: Sequence[str] = NINE
    thresholds: Sequence[float] = (0.95,)
    repeats: int = 1
    model: str = "simulated/block-diffusion-7b"
    data: str = "hub"
    depth: int = 28
    shard_size: int = 50
    actors: int = 2
    seed: int = 0
    cold_start: bool = False  # each actor's first trial at half speed, as without a warm-up
    trials: int | None = None  # so many of them were run, the others are missing
    changes: Mapping[str, Any] = field(default_factory=dict)  # column: value or function of (policy, columns)

    @property
    def scored(self) -> set[str]:
        return {task for task in self.documents if task == "mmlu"}


class QuickDisk(Disk):
    """Skips flushing to disk, because these tests do not simulate power failures."""

    def sync(self, handle: int) -> None:
        del handle

    def sync_folder(self, path: Path) -> None:
        del path


@dataclass(kw_only=True)
class Actor:
    name: str
    speed: float
    at: datetime
    load_seconds: float
    used: bool = False


def write_sweep(folder: Path, simulation: Simulation | None = None) -> Path:
    """A folder as a sweep leaves it."""
    sim = simulation or Simulation()
    rng = np.random.default_rng(sim.seed)
    pools = {task: (options_pool if task in sim.scored else reasoning_pool)(sim.seed) for task in sim.documents}
    documents = {task: _documents(task, count, pools[task], sim) for task, count in sim.documents.items()}
    truth = {task: _truth(task, len(table), rng) for task, table in documents.items()}
    actors = [
        Actor(name=f"worker-{n + 1}", speed=1 - 0.08 * n, at=BEGAN + timedelta(seconds=52 + 3 * n), load_seconds=38.0)
        for n in range(sim.actors)
    ]
    with StoreWriter(folder, disk=QuickDisk()) as store:
        store.write_sweep_record(_request(sim))
        for task, table in documents.items():
            store.write_documents(task, table)
        for trial in list(_plan(sim))[: sim.trials]:
            shard = documents[trial["task"]].filter(pa.compute.field("shard") == trial["shard"])
            actor = min(actors, key=lambda one: one.at)
            _run(store, sim, trial, shard, truth[trial["task"]], pools[trial["task"]], actor, rng)
    return folder


def _documents(task: str, count: int, pool: Pool, sim: Simulation) -> pa.Table:
    subtasks = SUBTASKS[task]
    rows = []
    for n in range(count):
        subtask, index = subtasks[n % len(subtasks)], n // len(subtasks)
        script = pool.scripts[n % SCRIPTS]
        rows.append(
            {
                "doc_id": f"{subtask}/{index}",
                "subtask": subtask,
                "doc_hash": hashlib.sha256(f"{subtask}/{index}".encode()).hexdigest()[:16],
                "shard": n // sim.shard_size,
                "level": script.level if task == "minerva_math" else None,
                "question": script.question,
                "choices": script.choices,
                "gold": script.gold,
            }
        )
    return pa.Table.from_pylist(rows, schema=DOCUMENTS)


def _truth(task: str, count: int, rng: np.random.Generator) -> dict[str, Any]:
    """What is fixed for each document: whether k=1 is right, and how soon each k leaves its answer."""
    truth = {"right": rng.random(count) < RIGHT[task], "luck": rng.random(count), "other": rng.random(count)}
    truth["right"][0], truth["luck"][0] = True, 0.0  # the first document, whose wrong answer is hostile, always breaks
    return truth


def _plan(sim: Simulation) -> Iterator[dict[str, Any]]:
    most = max(sim.documents.values())
    for repeat in range(sim.repeats):
        for shard in range(-(-most // sim.shard_size)):
            for task, count in sim.documents.items():
                if shard * sim.shard_size >= count:
                    continue
                thresholds = (0.95,) if task in sim.scored else sim.thresholds
                chosen = [(policy, threshold) for policy in sim.policies for threshold in thresholds]
                random.Random(f"{sim.seed}:{repeat}:{shard}:{task}").shuffle(chosen)
                for policy, threshold in chosen:
                    spec = {
                        "task": task,
                        "policy": policy,
                        "threshold": threshold,
                        "small_block": 8,
                        "block_cache": True,
                        "repeat": repeat,
                        "shard": shard,
                    }
                    digest = hashlib.sha256(json.dumps([sim.model, spec]).encode()).hexdigest()
                    yield {"trial_id": digest[:16], **spec}


def _run(
    store: StoreWriter,
    sim: Simulation,
    trial: Mapping[str, Any],
    shard: pa.Table,
    truth: Mapping[str, Any],
    pool: Pool,
    actor: Actor,
    rng: np.random.Generator,
) -> None:
    speed = actor.speed * (0.45 if sim.cold_start and not actor.used else 1.0) * float(np.exp(rng.normal(0, 0.01)))
    calibration = 52.0 * actor.speed * float(np.exp(rng.normal(0, 0.01)))
    actor.used = True
    columns = columns_of(sim, trial, shard, truth, pool, speed, rng)
    begin = actor.at + timedelta(seconds=2.4)
    stamps = np.concatenate(([0.0], np.cumsum(columns["batch_seconds"])[:-1]))
    columns |= {
        "sweep": _name(sim),
        "attempt": 0,
        "actor": actor.name,
        "node": "node-1",
        "device": DEVICE["name"],
        "calibration": calibration,
        "started_at": pa.array(
            [begin + timedelta(seconds=float(stamp)) for stamp in stamps], ROWS.field("started_at").type
        ),
    }
    for name, change in sim.changes.items():
        columns[name] = change(trial["policy"], columns) if callable(change) else change
    count = len(shard)
    filled = [_filled(columns.get(field.name), count, field.type) for field in ROWS]
    facts = {
        "actor": actor.name,
        "node": "node-1",
        "device": DEVICE,
        "load_seconds": actor.load_seconds,
        "warm_up_seconds": 9.5,
        "warm_up_settled": True,
        "calibration": calibration,
        "calibration_seconds": 2.4,
        "packages": PACKAGES,
        "code": CODE,
        "layers": list(columns["layers"][0]),
        "settings": {"threshold": trial["threshold"], "small_block": 8, "dtype": "float16", "batch_size": 1},
        "started_at": begin.isoformat(),
    }
    store.begin(trial, facts)
    store.append(trial["trial_id"], 0, pa.RecordBatch.from_arrays(filled, schema=ROWS))
    spent = float(np.sum(columns["batch_seconds"]))
    actor.at = begin + timedelta(seconds=spent + 0.02)
    ended = {"ended_at": actor.at.isoformat(), "seconds": spent + 2.5, "peak_memory": 15_700_000_000}
    store.finish(trial["trial_id"], ended, shard["doc_id"].to_pylist())


def columns_of(
    sim: Simulation,
    trial: Mapping[str, Any],
    shard: pa.Table,
    truth: Mapping[str, Any],
    pool: Pool,
    speed: float,
    rng: np.random.Generator,
) -> dict[str, Any]:
    """The columns that a policy has an effect on; one value stands for a whole column."""
    policy = ReusePolicy.parse(trial["policy"])
    layers = policy.layer_indices(sim.depth, None)
    at = np.arange(len(shard)) + trial["shard"] * sim.shard_size
    k = policy.k or 2  # policies beyond the grid are simulated like k2
    correct, answer = _answers(k, at, truth, pool, trial["policy"] + str(trial["threshold"]))
    token_ids = pool.token_ids.take(pa.array(answer))
    scored = trial["task"] in sim.scored
    tokens = np.zeros(len(at), dtype=int) if scored else pa.compute.list_value_length(token_ids).to_numpy() + 1
    passes = _passes(k, tokens, sim.depth, len(layers), scored)
    per_layer_position, per_pass = 1.4e-6, 0.011
    done = sum(passes[kind] for kind in ("passes_prefill", "passes_full", "passes_small", "passes_commit"))
    share = passes["layers_computed"] / (passes["layers_computed"] + passes["layers_reused"])
    seconds = (per_layer_position * passes["layer_positions"] + per_pass * done * (0.12 + 0.88 * share)) / speed
    seconds = seconds * np.exp(rng.normal(0, 0.03, len(at)))
    ends = ["length" if n > 400 else "stop" for n in tokens]
    metric = PRIMARY[trial["task"]]
    return {
        **{name: trial[name] for name in ("trial_id", "task", "shard", "policy", "threshold", "small_block", "repeat")},
        "block_cache": trial["block_cache"],
        "reveal": "threshold",
        "subtask": shard["subtask"].combine_chunks(),
        "doc_id": shard["doc_id"].combine_chunks(),
        "doc_hash": shard["doc_hash"].combine_chunks(),
        "k": policy.k,
        "subset": policy.layers,
        "mode": None if policy.layers is None else policy.mode,
        "layers": [list(layers)] * len(at),
        "batch_size": 1,
        "dtype": "float16",
        "correct": pa.array(correct),
        "metrics": [json.dumps({metric: float(value)}) for value in correct],
        "prompt_tokens": 120,
        "tokens": tokens,
        "seconds": seconds,
        "batch_id": np.arange(len(at)),
        "batch_seconds": seconds * 1.01,
        **passes,
        "finish": None if scored else ends,
        "text": pool.texts.take(pa.array(answer)),
        "token_ids": token_ids,
        "scores": [[-1.0 - (c == 0), -1.5, -2.0, -3.0] for c in correct] if scored else [[]] * len(at),
    }


def _answers(k: int, at: Any, truth: Mapping[str, Any], pool: Pool, variant: str) -> tuple[Any, Any]:
    """Whether each document is right, and the place of its answer in the pool."""
    right, luck = truth["right"][at], truth["luck"][at]
    drift = random.Random(variant).random() * 0.02  # subsets of the same k lose nearly the same documents
    flipped = np.where(right, luck < LOST[k] + drift * (k > 1), luck < WON[k])
    correct = right ^ flipped
    differs = flipped | (truth["other"][at] < CHANGED[k])
    tail = (at * 7 + zlib_of(variant)) % (TAILS // 2) * 2 + (~correct)
    place = np.where(differs, 2 + np.where(right, 0, TAILS) + tail, np.where(right, 0, 1))
    return correct, (at % SCRIPTS) * pool.per_script + place


def zlib_of(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:4], 16)


def _passes(k: int, tokens: Any, depth: int, reused: int, scored: bool) -> dict[str, Any]:
    """Blocks of 32, about two tokens a step, four full passes in each block; scored: four options, k passes each."""
    blocks = np.maximum(1, -(-tokens // 32))
    steps = np.full(len(tokens), 4 * k) if scored else blocks * (14 + (tokens % 5))
    full = steps if scored else blocks * 4
    small = steps - full
    per_block = 1 if scored else blocks
    replayed = np.zeros_like(steps) if k == 1 else steps - per_block * -(-(steps // per_block) // k)
    commit = np.zeros_like(steps) if scored else blocks
    prefill = np.ones_like(steps)
    in_full = np.where(steps > 0, replayed * full // steps, 0)
    saved = reused * (in_full * 32 + (replayed - in_full) * 8)
    return {
        "passes_prefill": prefill,
        "passes_full": full,
        "passes_small": small,
        "passes_commit": commit,
        "layers_computed": (prefill + full + small + commit) * depth - replayed * reused,
        "layers_reused": replayed * reused,
        "layer_positions": depth * (prefill * 120 + (full + commit) * 32 + small * 8) - saved,
        "prefill_tokens": prefill * 120,
        "eligible": replayed,
        "replayed": replayed,
    }


def _filled(value: Any, count: int, kind: pa.DataType) -> pa.Array:
    if isinstance(value, pa.Array):
        return value.cast(kind)
    if isinstance(value, list | np.ndarray):
        return pa.array(value, kind)
    return pa.array([value] * count, kind)


def _name(sim: Simulation) -> str:
    return f"simulated-{hashlib.sha256(sim.model.encode()).hexdigest()[:8]}"


def _request(sim: Simulation) -> dict[str, Any]:
    tasks = list(sim.documents)
    datasets = {task: {f"simulated/{task}": "1" * 40} for task in tasks}
    identity = {
        "model": sim.model,
        "model_revision": "2" * 40,
        "depth": sim.depth,
        "dtype": "float16",
        "subset_size": 12,
        "data": sim.data,
        "datasets": datasets,
        "sample": None,
        "seed": sim.seed,
        "fewshot": None,
        "chat_template": True,
        "max_new_tokens": None,
        "batch_size": 1,
        "shard_size": sim.shard_size,
    }
    settings = {
        "tasks": tasks,
        "policies": list(sim.policies),
        "threshold": list(sim.thresholds),
        "small_block": [8],
        "block_cache": [True],
        "limit": None,
        "repeats": sim.repeats,
        "batch_size": 1,
        "shard_size": sim.shard_size,
        "seed": sim.seed,
    }
    return {
        "sweep": _name(sim),
        "created": BEGAN.isoformat(),
        "identity": identity,
        "settings": settings,
        "margin": 5.0,
        "speedup": 1.2,
        "model": {"source": sim.model, "revision": "2" * 40, "depth": sim.depth, "parameters": 7_615_616_512},
        "tasks": {
            task: {
                "kind": "loglikelihood" if task in sim.scored else "generate",
                "primary": PRIMARY[task],
                "documents": count,
                "fewshot": 0,
                "source": sim.data,
                "datasets": datasets[task],
            }
            for task, count in sim.documents.items()
        },
        "commands": [
            {"argv": ["--tasks", ",".join(tasks)], "at": BEGAN.isoformat(), "code": CODE, "packages": PACKAGES}
        ],
    }


def write_compacted_sweep(folder: Path, sim: Simulation) -> Path:
    """The same for many short trials, as a sweep leaves them: written to compacted files without their folders."""
    rng = np.random.default_rng(sim.seed)
    number = 0
    with StoreWriter(folder, disk=QuickDisk()) as store:
        (folder / COMPACTED_FOLDER).mkdir()
        for task, count in sim.documents.items():
            pool = (options_pool if task in sim.scored else reasoning_pool)(sim.seed)
            documents, truth = _documents(task, count, pool, sim), _truth(task, count, rng)
            store.write_documents(task, documents)
            for repeat, policy in product(range(sim.repeats), sim.policies):
                rows, records = _short_trials(sim, task, policy, repeat, documents, truth, pool, rng)
                files = max(1, len(rows) // FULL_ROWS)
                shards = -(-count // sim.shard_size)
                for part in range(files):
                    ids = list(records)[shards * part // files : shards * (part + 1) // files]
                    mine = rows.filter(pa.compute.is_in(rows["trial_id"], pa.array(ids)))
                    number += 1
                    path = folder / COMPACTED_FOLDER / f"{task}-{number:06}-00000000.parquet"
                    path.write_bytes(encode_compacted(mine.combine_chunks(), {one: records[one] for one in ids}))
        store.write_sweep_record(_request(sim))
    return folder


def _short_trials(
    sim: Simulation,
    task: str,
    policy: str,
    repeat: int,
    documents: pa.Table,
    truth: Mapping[str, Any],
    pool: Pool,
    rng: np.random.Generator,
) -> tuple[pa.Table, dict[str, dict[str, Any]]]:
    """All rows of a policy's run over a task, and the trial.json of each of its trials."""
    settings = {"task": task, "policy": policy, "threshold": 0.95, "small_block": 8, "block_cache": True}
    columns = columns_of(
        sim, {"trial_id": "", **settings, "repeat": repeat, "shard": 0}, documents, truth, pool, 1, rng
    )
    shard = documents["shard"].to_numpy()
    shards = int(shard[-1]) + 1
    name = hashlib.sha256(json.dumps([sim.model, settings, repeat]).encode()).hexdigest()
    ids = [f"{name[:11]}{place:05x}" for place in range(shards)]
    actor = [f"worker-{1 + place % sim.actors}" for place in range(shards)]
    speed = np.exp(rng.normal(0, 0.03, shards))
    begin = np.arange(shards) * 33.0 + rng.random() * 30
    seconds = columns["batch_seconds"] / speed[shard]
    columns |= {
        "sweep": _name(sim),
        "trial_id": pa.array(ids).take(pa.array(shard)),
        "shard": shard,
        "seconds": seconds / 1.01,
        "batch_seconds": seconds,
        "batch_id": np.arange(len(shard)) % sim.shard_size,
        "attempt": 0,
        "actor": pa.array(actor).take(pa.array(shard)),
        "node": "node-1",
        "device": DEVICE["name"],
        "calibration": 52.0 * speed[shard],
        "started_at": pa.array(
            ((BEGAN.timestamp() + begin[shard] + 3.0 * (np.arange(len(shard)) % sim.shard_size)) * 1e6).astype(np.int64)
        ).cast(ROWS.field("started_at").type),
    }
    rows = pa.Table.from_arrays([_filled(columns.get(f.name), len(shard), f.type) for f in ROWS], schema=ROWS)
    correct = columns["correct"].to_numpy(zero_copy_only=False)
    count, *sums = (
        np.bincount(shard, weights)
        for weights in (None, correct, columns["tokens"], seconds, columns["layer_positions"])
    )
    records = {}
    for place, trial_id in enumerate(ids):
        right, tokens, spent, positions = (float(values[place]) for values in sums)
        started = BEGAN + timedelta(seconds=float(begin[place]))
        attempt = {
            "attempt": 0,
            "started_at": started.isoformat(timespec="milliseconds"),
            "actor": actor[place],
            "node": "node-1",
            "device": DEVICE,
            "packages": PACKAGES,
            "code": CODE,
            "load_seconds": 38.0,
            "warm_up_seconds": 9.5,
            "calibration": 52.0 * float(speed[place]),
            "calibration_seconds": 0.0,
            "preparing_seconds": 0.01,
            "process": 4321,
            "seconds": spent + 0.1,
            "decode_seconds": spent,
            "waiting_seconds": 0.01,
            "recalibration_seconds": 0.0,
            "peak_memory": 15_700_000_000,
            "ended_at": (started + timedelta(seconds=spent + 0.2)).isoformat(timespec="milliseconds"),
        }
        totals = Sums(
            baseline=policy.startswith("k1"),
            documents=int(count[place]),
            correct=int(right),
            tokens=int(tokens),
            seconds=spent,
            work=52.0 * float(speed[place]) * spent,
            layer_positions=int(positions),
            scored={repeat: int(count[place])},
            actor=actor[place],
        )
        records[trial_id] = {
            **new_trial_record({"trial_id": trial_id, **settings, "repeat": repeat, "shard": place}),
            "status": "finished",
            "rows": int(count[place]),
            "sha256": "0" * 64,
            TOTALS_KEY: totals.as_json(),
            "attempts": [attempt],
            "settings": {"threshold": 0.95, "small_block": 8, "dtype": "float16", "batch_size": 1},
            "layers": list(columns["layers"][0]),
        }
    return rows, records
