"""Warm-up of a model, and the times of its passes, of decoding, prefill and scoring.

Alternatives are timed in alternation within one run, so that ratios hold on a noisy machine. The floor of a pass is the
time of its matrix products alone: a plain `F.linear` for each matrix of the model.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from sampler.attention import Rows
from sampler.cache import ReuseCache
from sampler.config import SDAR, ModelConfig, expected_shapes
from sampler.decode import Predictor, decode_prompts
from sampler.device import synchronise
from sampler.engine import Engine, Pass, Prefill, Row
from sampler.loading import LoadedModel
from sampler.passes import PassRunner, PassSegment
from sampler.plan import (
    PARTIAL,
    SKIP,
    WATCHED_INPUT,
    CacheSpec,
    LayerPlan,
    PassKind,
    PastPass,
    StepContext,
    compute_all,
)
from sampler.policy import ReusePolicy
from sampler.records import Counters, Pair, Prompt, Scored
from sampler.scoring import score_pairs

PROMPT_TOKENS = 200
LATE_STEP = 16  # the step at which deciding is timed: few blocks take more
UNCOUNTED_ROUNDS = 3
FLOOR_WEIGHT_BYTES = 512 << 20
WARM_UP_PROMPT_BLOCKS = 4
CUDA_WARM_UP_SECONDS = 3.0  # until a GPU's clocks have risen
CUDA_WARM_UP_POSITIONS = 4096  # of the longest row, as in the estimate of memory: kernels are chosen and loaded by size
SETTLED_ROUNDS = 3  # a warm-up ends when this many rounds brought no improvement
IMPROVEMENT = 0.9  # a round must take less than this share of the best time to count as an improvement
MAX_WARM_UP_ROUNDS = 40
MAX_WARM_UP_SECONDS = 60.0
TINY = ModelConfig(
    num_layers=36,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=160,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    tied_embeddings=False,
    block_size=32,
    mask_token_id=159,
    eos_token_ids=(158,),
    pad_token_id=157,
)
MID = replace(
    TINY,
    num_layers=28,
    hidden_size=512,
    intermediate_size=1408,
    num_heads=8,
    head_dim=64,
    vocab_size=32_000,
    mask_token_id=31_999,
    eos_token_ids=(31_998,),
    pad_token_id=31_997,
)
SHAPES = {"tiny": TINY, "mid": MID, "mid-qwen3": replace(MID, family=SDAR)}


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmUp:
    """The duration and the work of a warm-up."""

    seconds: float
    rounds: tuple[float, ...]  # seconds per round
    settled: bool  # False if it ended because of MAX_WARM_UP_ROUNDS or MAX_WARM_UP_SECONDS
    counters: Counters


def warm_up(
    model: LoadedModel,
    *,
    batch_size: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    min_seconds: float | None = None,
    positions: Sequence[int] | None = None,
) -> WarmUp:
    """Runs rounds of all kinds of passes until they get no faster, so that the first documents are not slower.

    The passes and tokens are fixed; they do not depend on what the model predicts. `positions` are the lengths of the
    rows; by default a short one, and on CUDA also a long one for at least CUDA_WARM_UP_SECONDS.
    """
    network, config = model.network, model.config
    on_cuda = network.device.type == "cuda"
    if min_seconds is None:
        min_seconds = CUDA_WARM_UP_SECONDS if on_cuda else 0.0
    if positions is None:
        short = (WARM_UP_PROMPT_BLOCKS + 1) * config.block_size
        positions = (short, CUDA_WARM_UP_POSITIONS) if on_cuda else (short,)
    bound = ReusePolicy.parse("k2_middle").bind(config.num_layers)
    prompts = sorted({max(1, min(length, config.max_positions) // config.block_size - 1) for length in positions})
    engine: Engine[None] = Engine(
        network,
        cache_spec=bound.cache_spec,
        slots=batch_size,
        capacity=(prompts[-1] + 1) * config.block_size,
        reader=Predictor(mask_token_id=config.mask_token_id),
        reads=config.block_size,
    )
    replay = bound.plan(StepContext(step=1, kind=PassKind.FULL, window=range(0), revealed_at=()))
    counters = Counters()
    rounds: list[float] = []
    began = clock()
    done = False
    while not (done or len(rounds) >= MAX_WARM_UP_ROUNDS or clock() - began >= MAX_WARM_UP_SECONDS) or (
        clock() - began < min_seconds
    ):
        started = clock()
        for blocks in prompts:
            for finished in engine.run(_warm_up_row(config, blocks, replay) for _ in range(batch_size)):
                counters += finished.counters
        synchronise(network.device)
        rounds.append(clock() - started)
        done = settled(rounds)
    return WarmUp(seconds=clock() - began, rounds=tuple(rounds), settled=done, counters=counters)


def settled(rounds: list[float]) -> bool:
    """Whether the best of the last rounds is hardly better than the best round before them."""
    recent, earlier = rounds[-SETTLED_ROUNDS:], rounds[:-SETTLED_ROUNDS]
    return bool(earlier) and min(recent) >= IMPROVEMENT * min(earlier)


def _warm_up_row(config: ModelConfig, blocks: int, replay: LayerPlan) -> Row[None]:
    """One sequence through one block: prefill, denoising with and without replay, commit."""
    size = config.block_size
    small = config.decode_defaults["small_block"]
    start = blocks * size
    special = (config.mask_token_id, *config.eos_token_ids)
    token = next(token for token in range(config.vocab_size) if token not in special)
    compute = compute_all(config.num_layers)
    yield Prefill(tokens=[token] * start, queries=(0.0,))
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
            queries=(0.0,) * width,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTimes:
    """Median milliseconds of one pass: computed, replayed, its bare matrix products, and its head."""

    computed: float
    replayed: float
    floor: float
    head: float
    selecting: float = 0.0  # what the checkpoints of the replaying pass measure and select

    def reuse_ratio(self, share: float) -> float:
        """A replaying pass relative to the ideal: the share of layer-positions it computes, plus the head."""
        return self.replayed / (share * (self.computed - self.head) + self.head)


class Bench:
    """Measures one model on random, seeded prompts; nothing depends on what the model predicts."""

    def __init__(self, model: LoadedModel, *, rounds: int, new_tokens: int, questions: int) -> None:
        self.model, self.config = model, model.config
        self.rounds, self.new_tokens, self.questions = rounds, new_tokens, questions
        self.start = PROMPT_TOKENS // self.config.block_size * self.config.block_size  # of the denoised block
        self.end = self.start + self.config.block_size
        self.small: int = self.config.decode_defaults["small_block"]
        self.small_start = PROMPT_TOKENS // self.small * self.small
        self.predictor = Predictor(mask_token_id=self.config.mask_token_id)

    def pass_times(self, kind: PassKind, batch: int = 1, policy: str = "k1") -> PassTimes:
        """A denoising pass right after the prompt, with one position of its small block revealed."""
        bound = ReusePolicy.parse(policy).bind(self.config.num_layers)
        begin, width = (
            (self.small_start, self.small) if kind is PassKind.SMALL else (self.start, self.config.block_size)
        )
        read = tuple(range(self.small_start - begin, self.small_start - begin + self.small - 1))
        plans = {"computed": compute_all(self.config.num_layers), "replayed": bound.plan(self.context(kind))}
        plans |= narrowing_alone(plans["replayed"], self.context(kind).window)
        parts = self._parts(rows=batch * width, predictions=batch * len(read))
        network, reads = self.model.network, self.small
        runner = PassRunner(
            network, bound.cache_spec, slots=batch, capacity=self.end, reader=self.predictor, reads=reads
        )
        tokens = [self._tokens(number, self.end) for number in range(batch)]
        opening = [PassSegment(slot=row, start=self.start, tokens=t[self.start :]) for row, t in enumerate(tokens)]
        segments = [
            PassSegment(slot=row, start=begin, tokens=t[begin : begin + width], read=read, queries=(0.0,) * len(read))
            for row, t in enumerate(tokens)
        ]

        @torch.inference_mode()
        def run(kind: PassKind, plan: LayerPlan, rows: Sequence[PassSegment]) -> None:
            planned = [replace(row, selected=plan.selected, priors=plan.priors) for row in rows]
            most = runner.sequences(kind, len(rows[0].tokens)) if runner.padded else batch
            for first in range(0, batch, most):
                runner.run(planned[first : first + most], plan, kind, reuse=bool(runner.reuse.row_of))

        # The prompt's keys and values stay zero: how long a pass takes does not depend on them.
        run(PassKind.FULL, plans["computed"], opening)
        times = self._medians({name: partial(run, kind, plan, segments) for name, plan in plans.items()} | parts)
        selecting = times.pop("with checkpoints", 0.0) - times.pop("without checkpoints", 0.0)
        return PassTimes(selecting=max(0.0, selecting), **times)

    def _medians(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Median milliseconds of each call; they are timed in alternation."""
        spent: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(self.rounds + UNCOUNTED_ROUNDS):
            for name, call in calls.items():
                began = self._now()
                call()
                spent[name].append(self._now() - began)
        return {name: statistics.median(times[UNCOUNTED_ROUNDS:]) * 1e3 for name, times in spent.items()}

    def context(self, kind: PassKind) -> StepContext:
        """The state before the second pass of a block, when the first has revealed one token."""
        first, block = self.small_start - self.start, self.config.block_size
        norms = torch.rand((block, 2), generator=torch.Generator().manual_seed(0)).tolist()
        opening = PastPass(
            window=range(block), plan=compute_all(self.config.num_layers), measured={WATCHED_INPUT: norms}
        )
        return StepContext(
            step=1,
            kind=kind,
            window=range(first, first + self.small) if kind is PassKind.SMALL else range(block),
            revealed_at=(*[-1] * first, 0, *[None] * (block - first - 1)),
            past=(opening,),
        )

    def share(self, policy: str, kind: PassKind) -> float:
        """Share of a pass's layer-positions that run when the policy replays; half a layer counts by its weights."""
        context = self.context(kind)
        plan = ReusePolicy.parse(policy).bind(self.config.num_layers).plan(context)
        attention, mlp = (part / sum(self.config.layer_weights) for part in self.config.layer_weights)
        window = len(context.window)
        costs = [
            (attention * step.runs_attention + mlp * step.runs_mlp) * plan.positions(layer, window) / window
            for layer, step in enumerate(plan.steps)
        ]
        return 0.0 if plan.stale else sum(costs) / len(costs)

    def deciding(self, policy: str) -> float:
        """Median milliseconds that measuring and planning take for one row before a full pass."""
        bound = ReusePolicy.parse(policy).bind(self.config.num_layers)
        context = self.context(PassKind.FULL)
        late = replace(context, step=LATE_STEP, past=context.past * LATE_STEP)
        network = self.model.network
        cache = ReuseCache(bound.cache_spec, self.config, 1, dtype=network.dtype, device=network.device)
        states = torch.randn((self.config.block_size, self.config.hidden_size), dtype=network.dtype).to(network.device)

        def decide() -> None:
            bound.plan(late)
            if bound.cache_spec.watched_layer is not None:
                view = cache.view(Rows([0], [context.window]))
                view.store(WATCHED_INPUT, states)
                torch.stack(list(view.measured.values())).tolist()

        return self._medians({"decide": decide})["decide"]

    def prefill_tokens_per_second(self) -> float:
        """The median speed of the prefill of one prompt."""
        spent = []

        def row() -> Row[None]:
            for number in range(self.rounds // 4 + 1 + UNCOUNTED_ROUNDS):
                spent.append(-self._now())
                yield Prefill(tokens=self._tokens(number, self.start), queries=(0.0,))
                spent[-1] += self._now()

        engine: Engine[None] = Engine(
            self.model.network, cache_spec=CacheSpec(), slots=1, capacity=self.end, reader=self.predictor, reads=1
        )
        list(engine.run([row()]))
        return self.start / statistics.median(spent[UNCOUNTED_ROUNDS:])

    def decode(self, documents: int, batch: int = 1, policy: str = "k1") -> tuple[float, Counters]:
        """Decodes random prompts; returns tokens per second and the work done."""
        prompts = [Prompt(ids=tuple(self._tokens(number, PROMPT_TOKENS))) for number in range(documents)]
        settings = self.config.decode_settings({}, max_new_tokens=self.new_tokens)
        parsed = ReusePolicy.parse(policy)
        decoded = decode_prompts(self.model, prompts, policy=parsed, settings=settings, batch_size=batch)
        results = [generated for _, generated in decoded]
        seconds = max(g.started + g.seconds for g in results) - min(g.started for g in results)
        tokens = sum(len(g.ids) for g in results)
        return tokens / seconds, sum((g.counters for g in results), Counters())

    def scoring(self) -> dict[str, float]:
        """Compares scoring in one call with one call per pair: questions with four options share 400 leading tokens."""
        prefix = self._tokens(0, 400)
        pairs = [
            Pair(prefix=(*prefix, *self._tokens(1 + question, 60)), target=(option,))
            for question in range(self.questions)
            for option in range(4)
        ]
        shared_scores, shared_seconds = self._score([pairs])
        single_scores, single_seconds = self._score([[pair] for pair in pairs])
        positions = [sum(s.counters.layer_positions for s in scored) for scored in (shared_scores, single_scores)]
        return {
            "questions": self.questions,
            "token_forwards_ratio": positions[0] / positions[1],
            "seconds_ratio": shared_seconds / single_seconds,
            "largest_difference": max(
                abs(a.score - b.score) for a, b in zip(shared_scores, single_scores, strict=True)
            ),
        }

    def _score(self, calls: Sequence[Sequence[Pair]]) -> tuple[list[Scored], float]:
        began = self._now()
        k1 = ReusePolicy.parse("k1")
        scored = [dict(score_pairs(self.model, pairs, policy=k1)) for pairs in calls]
        return [results[i] for results in scored for i in range(len(results))], self._now() - began

    def _parts(self, rows: int, predictions: int) -> dict[str, Callable[[], object]]:
        """The pass's bare matrix products, and its head with the predictions read from it."""
        network, config = self.model.network, self.config

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=network.dtype, device=network.device)

        shapes = [shape for name, shape in expected_shapes(config).items() if ".0." in name and len(shape) == 2]
        layer_bytes = sum(m * k for m, k in shapes) * network.dtype.itemsize
        # Enough distinct layers to exceed every CPU cache, but not a second copy of a large model.
        distinct = min(config.num_layers, 1 + FLOOR_WEIGHT_BYTES // layer_bytes)
        layers = [[random(*shape) for shape in shapes] for _ in range(distinct)]
        inputs = {k: random(rows, k) for _, k in shapes}
        states = random(predictions, config.hidden_size)
        head = random(config.vocab_size, config.hidden_size)
        empty = torch.empty(0, dtype=torch.int64, device=network.device)

        @torch.inference_mode()
        def floor() -> None:
            for index in range(config.num_layers):
                for matrix in layers[index % distinct]:
                    linear(inputs[matrix.shape[1]], matrix)
            linear(states, head)

        @torch.inference_mode()
        def head_and_predictions() -> None:
            self.predictor.read(network.logits(states), empty).tolist()

        return {"floor": floor, "head": head_and_predictions}

    def _tokens(self, seed: int, count: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        below = min(self.config.mask_token_id, *self.config.eos_token_ids, self.config.pad_token_id)
        tokens: list[int] = torch.randint(0, below, (count,), generator=generator).tolist()
        return tokens

    def _now(self) -> float:
        synchronise(self.model.device)
        return time.perf_counter()


def narrowing_alone(plan: LayerPlan, window: range) -> dict[str, LayerPlan]:
    """Two plans that run only the last narrowed layer of `plan`, for as many positions: with checkpoints, and without.

    They differ by what the checkpoints measure and select. Empty for a plan without checkpoints.
    """
    if not plan.checkpoints:
        return {}
    last = max(layer for layer, step in enumerate(plan.steps) if step is PARTIAL)
    steps = tuple(PARTIAL if layer == last else SKIP for layer in range(len(plan.steps)))
    kept = LayerPlan(steps, selected=tuple(window[: plan.checkpoints[-1].keep]))
    return {"with checkpoints": LayerPlan(steps, checkpoints=plan.checkpoints), "without checkpoints": kept}
