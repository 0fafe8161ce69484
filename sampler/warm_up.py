"""Runs each kind of pass until its times settle, so that no measured document is the first. Knows no tasks.

Rows ask for fixed passes of fixed tokens: what is run does not depend on what the model says.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sampler.commands import Pass, Prefill, Row
from sampler.config import ModelConfig
from sampler.engine import Engine
from sampler.loading import LoadedModel
from sampler.plan import LayerPlan, PassKind, StepContext, compute_all
from sampler.policy import ReusePolicy
from sampler.records import Counters
from sampler.reveal import Predictor

RECENT = 3  # rounds that must bring nothing
GAIN = 0.9  # what counts as getting faster still
MOST_ROUNDS = 40
MOST_SECONDS = 60.0
PROMPT_BLOCKS = 4
SMALL = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmUp:
    """What a warm-up took, and the work it did."""

    seconds: float
    rounds: tuple[float, ...]  # seconds of each
    settled: bool
    counters: Counters


def warm_up(
    model: LoadedModel,
    *,
    batch_size: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    most_seconds: float = MOST_SECONDS,
) -> WarmUp:
    """Rounds of prefill, full, small, replaying and commit passes until three in a row are no faster than before."""
    network, config = model.network, model.config
    bound = ReusePolicy.parse("k2_middle").bind(config.num_layers)
    blocks = max(1, min(PROMPT_BLOCKS, config.max_positions // config.block_size - 1))
    engine: Engine[None] = Engine(
        network,
        keeps=bound.keeps,
        slots=batch_size,
        capacity=(blocks + 1) * config.block_size,
        reader=Predictor(mask_token_id=config.mask_token_id),
    )
    replay = bound.plan(StepContext(step=1, kind=PassKind.FULL, window=range(0), revealed_at=()))
    counters = Counters()
    rounds: list[float] = []
    began = clock()
    while not (done := settled(rounds)) and len(rounds) < MOST_ROUNDS and clock() - began < most_seconds:
        started = clock()
        for finished in engine.run(_row(config, blocks, replay) for _ in range(batch_size)):
            counters += finished.counters
        if network.device.type == "cuda":
            torch.cuda.synchronize(network.device)
        rounds.append(clock() - started)
    return WarmUp(seconds=clock() - began, rounds=tuple(rounds), settled=done, counters=counters)


def settled(rounds: list[float]) -> bool:
    """The best of the last rounds is hardly better than the best before them; a single slow one proves nothing."""
    return len(rounds) > RECENT and min(rounds[-RECENT:]) >= GAIN * min(rounds[:-RECENT])


def _row(config: ModelConfig, blocks: int, replay: LayerPlan) -> Row[None]:
    """One sequence's way through a block: clean blocks, denoising with and without replay, commit."""
    size = config.block_size
    small = SMALL if size % SMALL == 0 else size
    start = blocks * size
    special = (config.mask_token_id, *config.eos_token_ids)
    token = next(token for token in range(config.vocab_size) if token not in special)
    compute = compute_all(config.num_layers)
    yield Prefill(tokens=[token] * start, asks=(0.0,))
    for kind, plan, width in (
        (PassKind.FULL, compute, size),
        (PassKind.FULL, replay, size),
        (PassKind.SMALL, compute, small),
        (PassKind.SMALL, replay, small),
        (PassKind.COMMIT, compute, size),
    ):
        yield Pass(
            kind=kind,
            start=start,
            tokens=[token] * width,
            plan=plan,
            opens_block=plan is compute and kind is PassKind.FULL,
            read=tuple(range(width)),
            asks=(0.0,) * width,
        )
