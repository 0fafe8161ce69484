"""The reference implementation's answers as values: what can be compared, and with what. Runs no model."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sampler.records import DecodeSettings

GOLDEN = Path(__file__).parent / "golden"
BLOCK, MASK, STOP = 32, 159, 158
PASSES = ("prefill", "full", "small", "commit")
COMPARABLE_IN_A_BATCH = {"quirk_short_rows_get_extra_tokens", "quirk_ragged_block_multiple_row"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A denoising step of one row: `tokens` are its block's after the step."""

    block: int
    small: int
    kind: str  # "full" or "small"
    tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldenRow:
    """One prompt of a case. `settings` ask for as many tokens as the reference returned for it."""

    id: str
    model: str
    prompt: tuple[int, ...]
    settings: DecodeSettings
    ids: tuple[int, ...]  # the continuation up to and including the first stop token
    passes: dict[str, int]  # of the whole case; a stop ended it only at the end of the block
    margin: float  # the smallest decision margin in the whole case
    trace: tuple[Step, ...] | None  # None where the reference left no trace

    @property
    def stopped(self) -> bool:
        return self.ids[-1] == STOP


def model_folder(name: str) -> Path:
    return GOLDEN / name


@cache
def single_rows() -> tuple[GoldenRow, ...]:
    """Robust cases of one prompt in which the reference did nothing that we do differently on purpose."""
    return tuple(_row(case, 0) for case in _load("generation_cases") if len(case["prompts"]) == 1 and _sound(case))


@cache
def batch_rows() -> tuple[GoldenRow, ...]:
    """Rows of cases of four prompts that do not depend on their batch mates; `passes` are the batch's."""
    return tuple(
        _row(case, row)
        for case in _load("generation_cases")
        if len(case["prompts"]) > 1 and _sound(case) and COMPARABLE_IN_A_BATCH.issuperset(case["flags"])
        for row, prompt in enumerate(case["prompts"])
        if len(prompt) % BLOCK or "quirk_ragged_block_multiple_row" not in case["flags"]
    )


def loglikelihood_cases() -> list[dict[str, Any]]:
    """Scores of pairs that we accept: an empty prefix and a mask id in the prefix are refused instead."""
    return [case for case in _load("loglikelihood_cases") if case["prefix"] and MASK not in case["prefix"]]


def logits_probes() -> list[dict[str, Any]]:
    return _load("logits_probe")


@cache
def _load(name: str) -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads((GOLDEN / f"{name}.json").read_text())
    return loaded


def _sound(case: dict[str, Any]) -> bool:
    return case["robust"] and not any(flag.startswith("bug_") for flag in case["flags"])


def _row(case: dict[str, Any], row: int) -> GoldenRow:
    prompt, params, calls = tuple(case["prompts"][row]), case["params"], case["n_forward"]
    continuation = tuple(case["outputs"][row][len(prompt) :])
    until = continuation.index(STOP) + 1 if STOP in continuation else len(continuation)
    traces = [trace for trace in _load("step_traces") if trace["case"] == case["id"]]
    return GoldenRow(
        id=case["id"] if len(case["prompts"]) == 1 else f"{case['id']}-row{row}",
        model=case["model"],
        prompt=prompt,
        settings=DecodeSettings(
            threshold=params["threshold"],
            small_block=params["small_block_size"],
            block_cache=params["use_block_cache"],
            max_new_tokens=len(continuation),
        ),
        ids=continuation[:until],
        passes={kind: calls["finalize" if kind == "commit" else kind] for kind in PASSES},
        margin=case["min_margin"],
        trace=tuple(_steps(traces[0], row, prompt)) if traces else None,
    )


def _steps(trace: dict[str, Any], row: int, prompt: tuple[int, ...]) -> Iterator[Step]:
    """A row's own steps: the trace repeats its tokens while only others of its batch are denoised."""
    block, before = None, ()
    for step in trace["steps"]:
        if row not in step["rows"] or step["block"] < len(prompt) // BLOCK:
            continue
        tokens = tuple(step["x"][step["rows"].index(row)])
        if step["block"] != block:
            block = step["block"]
            known = prompt[block * BLOCK :] or tokens[:1]
            before = known + (MASK,) * (BLOCK - len(known))
        if tokens != before:
            yield Step(block=block, small=step["small"], kind=step["forward"], tokens=tokens)
        before = tokens
