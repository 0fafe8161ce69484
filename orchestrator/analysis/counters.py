"""Sums over a configuration's rows: passes, layers, tokens, times. Adds up and compares nothing."""

from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa

from orchestrator.analysis.facts import Key

SUMS = (
    "tokens",
    "prompt_tokens",
    "prefill_tokens",
    "passes_prefill",
    "passes_full",
    "passes_small",
    "passes_commit",
    "layers_computed",
    "layers_reused",
    "layer_positions",
    "eligible",
    "replayed",
    "seconds",
)
KEYS = ("task", "policy", "threshold", "small_block", "block_cache")


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """All rows of one configuration."""

    rows: int
    sums: dict[str, int | float]
    began: datetime
    ended: datetime  # when the last document began
    devices: tuple[str, ...]


def totals(rows: pa.Table) -> dict[Key, Totals]:
    wanted = [*((name, "sum") for name in SUMS), ("started_at", "min"), ("started_at", "max"), ("device", "distinct")]
    table = rows.select([*KEYS, *SUMS, "started_at", "device"])
    grouped = table.group_by(list(KEYS)).aggregate([*wanted, ([], "count_all")])
    return {
        tuple(row[name] for name in KEYS): Totals(
            rows=row["count_all"],
            sums={name: row[f"{name}_sum"] for name in SUMS},
            began=row["started_at_min"],
            ended=row["started_at_max"],
            devices=tuple(sorted(row["device_distinct"])),
        )
        for row in grouped.to_pylist()
    }
