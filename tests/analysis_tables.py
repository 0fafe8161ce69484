"""Rows of sweeps that never ran, with known truth: what a configuration loses, wins and gains is given, then drawn."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from orchestrator.store.schema import DOCUMENTS, ROWS

DEPTH = 36
NINE = tuple(f"k{k}_{subset}" for k in (1, 2, 3) for subset in ("first", "middle", "last"))
START = {"first": 1, "middle": 12, "last": 24}


@dataclass(frozen=True, kw_only=True)
class Truth:
    """Of one policy: shares of documents lost and won against k=1, speed-up in tokens/s, length against k=1."""

    lost: float = 0.0
    won: float = 0.0
    speedup: float = 1.0
    length: float = 1.0


@dataclass(frozen=True, kw_only=True)
class World:
    """What a simulated sweep is drawn from."""

    policies: Mapping[str, Truth] = field(default_factory=lambda: dict.fromkeys(NINE, Truth()))
    documents: int = 100
    subtasks: int = 1
    right: float = 0.8  # accuracy of k=1
    shard: int = 50
    batch: int = 1
    repeats: int = 1
    task: str = "gsm8k"
    kind: str = "generate"
    document_noise: float = 0.03  # of the clock, per document
    length_noise: float = 0.25  # how much a configuration's own lengths scatter about those of k=1
    trial_noise: float = 0.0  # of a whole trial: a calibration a little off
    actors: int = 2
    threshold: float = 0.95

    @property
    def difference(self) -> dict[str, float]:
        """True accuracy difference in points."""
        return {name: 100 * (truth.won - truth.lost) for name, truth in self.policies.items()}


def draw(world: World, seed: int | np.random.Generator = 0, *, answers: bool = True) -> pa.Table:
    """One sweep. `answers` False leaves token ids empty, which is quicker."""
    rng = np.random.default_rng(seed)
    n = world.documents
    strata = np.arange(n) % world.subtasks
    factor = np.linspace(0.5, 1.5, world.subtasks)[strata] if world.subtasks > 1 else np.ones(n)
    right = rng.random(n) < world.right
    length = np.maximum(8, rng.lognormal(np.log(100), 0.5, n))
    pace = rng.lognormal(np.log(0.02), 0.1, n)  # seconds per token of this document at k=1
    shared = _Shared(world=world, strata=strata, factor=factor, right=right, length=length, pace=pace)
    parts = []
    for policy, truth in world.policies.items():
        for repeat in range(world.repeats):
            parts.append(_run(shared, policy, truth, repeat, rng, answers))
    return pa.Table.from_batches(parts, schema=ROWS)


@dataclass(frozen=True, kw_only=True)
class _Shared:
    world: World
    strata: np.ndarray
    factor: np.ndarray
    right: np.ndarray
    length: np.ndarray
    pace: np.ndarray


def _run(s: _Shared, policy: str, truth: Truth, repeat: int, rng: np.random.Generator, answers: bool) -> pa.RecordBatch:
    """Lost and won shares are of all documents: those right at k=1 are lost with lost/right, and so on."""
    world, n = s.world, s.world.documents
    k, subset, mode = _parsed(policy)
    u = rng.random(n)
    lost = s.right & (u < truth.lost * s.factor / world.right)
    won = ~s.right & (u < truth.won * s.factor / (1 - world.right))
    correct = (s.right & ~lost) | won
    same = k == 1
    own = np.ones(n) if same else rng.lognormal(-(world.length_noise**2) / 2, world.length_noise, n) * truth.length
    tokens = np.maximum(1, np.round(s.length * own)).astype(int) if not same else np.round(s.length).astype(int)
    shard = np.arange(n) // world.shard
    trial_effect = rng.normal(0, world.trial_noise, shard.max() + 1)[shard]
    calibration = np.where(np.arange(shard.max() + 1) % 2, 50.0, 40.0)[shard]
    # true seconds: exact tokens ratio, so that the expected speed-up is the truth's
    pace = s.pace * tokens / truth.speedup * rng.lognormal(-(world.document_noise**2) / 2, world.document_noise, n)
    seconds = pace * 45 / calibration * np.exp(trial_effect)
    if world.kind == "loglikelihood":
        tokens = np.zeros(n, dtype=int)
    passes = np.maximum(1, tokens // 3 + 4)
    replays = 0 if same else (passes * (k - 1)) // k
    layers = [] if subset is None else list(range(START.get(subset, 1), START.get(subset, 1) + 12))
    reused = np.zeros(n, dtype=int) if same else replays * (DEPTH if mode == "output" else 12)
    batch = np.arange(n) % world.shard // world.batch
    if world.batch > 1:
        seconds = _per_batch(seconds, shard * 10_000 + batch)
    trial = np.array([f"{policy}-{repeat}-{number:03d}" for number in range(shard.max() + 1)])[shard]
    started = (
        1_700_000_000_000_000
        + (repeat * 1_000_000 + np.arange(n) * 10 + NINE.index(policy) % 9 if policy in NINE else np.arange(n))
        * 1_000_000
    )
    column: dict[str, Any] = {
        "sweep": "sim-00000000",
        "trial_id": trial,
        "task": world.task,
        "subtask": np.array([_subtask(world, i) for i in range(world.subtasks)])[s.strata],
        "shard": shard,
        "policy": policy,
        "k": k,
        "subset": subset,
        "mode": mode,
        "threshold": world.threshold,
        "small_block": 8,
        "block_cache": True,
        "reveal": "threshold",
        "batch_size": world.batch,
        "dtype": "float32",
        "doc_id": np.array([f"{world.task}/{i}" for i in range(n)]),
        "doc_hash": np.array([f"h{i}" for i in range(n)]),
        "correct": correct,
        "metrics": np.where(correct, '{"exact_match": 1.0}', '{"exact_match": 0.0}'),
        "prompt_tokens": 64,
        "tokens": tokens,
        "seconds": seconds,
        "batch_id": batch,
        "batch_seconds": seconds,
        "passes_prefill": 1,
        "passes_full": passes // 2,
        "passes_small": passes - passes // 2,
        "passes_commit": passes // 8,
        "layers_computed": (passes + 1 + passes // 8) * DEPTH - reused,
        "layers_reused": reused,
        "layer_positions": ((passes + 1 + passes // 8) * DEPTH - reused) * 20,
        "prefill_tokens": 64,
        "eligible": replays,
        "replayed": replays,
        "finish": None if world.kind == "loglikelihood" else "stop",
        "text": "an answer",
        "repeat": repeat,
        "attempt": 0,
        "actor": np.array([f"actor-{number % world.actors}" for number in range(shard.max() + 1)])[shard],
        "node": "node-0",
        "device": "cpu",
        "calibration": calibration,
        "started_at": started,
    }
    arrays = {name: _spread(value, n, ROWS.field(name).type) for name, value in column.items()}
    arrays["layers"] = _lists(np.tile(layers, n), np.full(n, len(layers)), pa.int32())
    lengths = np.minimum(tokens, 12) if answers else np.zeros(n, dtype=int)
    ids = np.repeat(np.arange(n) * 31 % 997 + correct, lengths) + _rising(lengths) + (0 if same else k * 7)
    if mode != "output" and not same and subset is not None:
        ids = ids + START.get(subset, 5)
    arrays["token_ids"] = _lists(ids, lengths, pa.int32())
    options = 4 if world.kind == "loglikelihood" else 0
    arrays["scores"] = _lists(np.tile(np.arange(options) * -1.0, n), np.full(n, options), pa.float64())
    return pa.RecordBatch.from_arrays([arrays.get(f.name, pa.nulls(n, f.type)) for f in ROWS], schema=ROWS)


def _subtask(world: World, number: int) -> str:
    return world.task if world.subtasks == 1 else f"{world.task}_{number}"


def _parsed(policy: str) -> tuple[int, str | None, str | None]:
    rule, _, options = policy.partition(".")
    k, _, subset = rule.partition("_")
    period = int(k[1:])
    return period, subset or None, None if period == 1 else ("output" if "output" in options else "residual")


def _spread(value: Any, n: int, kind: pa.DataType) -> pa.Array:
    if value is None:
        return pa.nulls(n, kind)
    array = pa.array(value) if isinstance(value, np.ndarray) else pa.repeat(pa.scalar(value), n)
    return array.cast(kind)


def _lists(flat: np.ndarray, lengths: np.ndarray, kind: pa.DataType) -> pa.Array:
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
    return pa.ListArray.from_arrays(offsets, pa.array(flat).cast(kind))


def _rising(lengths: np.ndarray) -> np.ndarray:
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    return np.arange(lengths.sum()) - np.repeat(starts, lengths)


def _per_batch(seconds: np.ndarray, group: np.ndarray) -> np.ndarray:
    _, code = np.unique(group, return_inverse=True)
    return np.bincount(code, weights=seconds)[code]


def described(world: World) -> dict[str, pa.Table]:
    """The documents of a world, as its folder would describe them."""
    n = world.documents
    columns = {
        "doc_id": [f"{world.task}/{i}" for i in range(n)],
        "subtask": [_subtask(world, i % world.subtasks) for i in range(n)],
        "doc_hash": [f"h{i}" for i in range(n)],
        "shard": [i // world.shard for i in range(n)],
        "level": [f"level {i % 5 + 1}" for i in range(n)],
        "question": ["?"] * n,
        "choices": [None] * n,
        "gold": ["!"] * n,
    }
    return {world.task: pa.table(columns, schema=DOCUMENTS)}


def asked(*worlds: World, margin: float = 5.0, speedup: float = 1.2) -> dict[str, Any]:
    """The sweep.json of these worlds."""
    request = {
        "schema": 1,
        "sweep": "sim-00000000",
        "identity": {
            "model": "tiny",
            "model_revision": "abc",
            "depth": DEPTH,
            "dtype": "float32",
            "batch_size": worlds[0].batch,
        },
        "settings": {
            "policies": list(dict.fromkeys(policy for world in worlds for policy in world.policies)),
            "threshold": sorted({world.threshold for world in worlds}),
            "small_block": [8],
            "block_cache": [True],
        },
        "margin": margin,
        "speedup": speedup,
        "model": {"source": "tiny", "revision": "abc", "depth": DEPTH, "parameters": 1_580_000},
        "tasks": {
            world.task: {"kind": world.kind, "primary": "exact_match", "documents": world.documents} for world in worlds
        },
        "commands": [
            {"argv": ["sweep"], "at": "2026-01-01T00:00:00Z", "code": {"commit": "0123456789abcdef", "dirty": False}}
        ],
    }
    return json.loads(json.dumps(request))


def grid(rest: Truth, **named: Truth) -> dict[str, Truth]:
    """The nine configurations: k=1 as it is, the others as given."""
    return {name: Truth() if name.startswith("k1") else named.get(name, rest) for name in NINE}


def changed(table: pa.Table, column: str, where: Sequence[bool] | np.ndarray, value: Any) -> pa.Table:
    """The table with another value in some rows of a column."""
    kind = table.schema.field(column).type
    old, mask = table[column].to_pylist(), np.asarray(where)
    new = [value if hit else kept for kept, hit in zip(old, mask, strict=True)]
    return table.set_column(table.schema.get_field_index(column), table.schema.field(column), pa.array(new, kind))
