"""The reference decoder: decodes and scores one sequence in the slowest obvious way.

There is no prefix cache: every pass recomputes the prefix, and prefill and commit return only their last logits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor, inf, log

import torch
import torch.nn.functional as F
from torch import Tensor

from oracle.model import BlockState, Cached, ReferenceModel, forward
from sampler.plan import (
    COMPUTE,
    REPLAY,
    WATCHED_INPUT,
    LayerPlan,
    Measurements,
    PassKind,
    PastPass,
    StepContext,
    compute_all,
    in_layers,
    resolve,
)
from sampler.policy import ReusePolicy
from sampler.records import DecodeSettings

__all__ = ["ReferenceGenerated", "ReferenceModel", "ReferenceScored", "reference_generate", "reference_score"]

SCORE_GAP_FACTOR = 10  # scores of checkpoints have smaller rounding errors than probabilities: their gaps count more
REVEALED_PER_STEP = 2  # r in the definition of rewind and replay


class Passes:
    """Runs and counts the passes of one sequence. Only denoising passes consult the policy."""

    def __init__(
        self, model: ReferenceModel, policy: ReusePolicy, subset_size: int | None, literal: bool = False
    ) -> None:
        assert not literal or policy.mode == "output", "only output mode has a literal form"
        span = policy.layer_indices(model.depth, subset_size)
        self.model, self.literal = model, literal
        self.policy = policy.bind(model.depth, subset_size)
        self.literal_plan = in_layers(REPLAY, span, model.depth)
        self.last_step, self.past, self.gap = -1, list[PastPass](), inf
        self.counts = {kind.value: 0 for kind in PassKind}
        self.layers = {"computed": 0, "reused": 0, "positions": 0}

    def clean(self, kind: PassKind, tokens: Sequence[int]) -> Tensor:
        """Prefill or commit: all layers of whole blocks; returns the logits of the next token."""
        state, window = BlockState(), range(len(tokens) - self.model.block, len(tokens))
        forward(self.model, tokens, window, compute_all(self.model.depth), state)
        self._count(kind, [len(tokens if kind is PassKind.PREFILL else window)] * self.model.depth)
        return self.model.logits(state.final[len(tokens) - 1])

    def denoise(self, tokens: Sequence[int], window: range, kind: PassKind, step: int) -> None:
        """A denoising pass of the last block of `tokens`; step 0 begins a new block."""
        masked = [token == self.model.mask for token in tokens]
        if step == 0:
            self.state, self.past = BlockState(), []
            self.revealed_at = [None if hidden else -1 for hidden in masked]
        for position, hidden in enumerate(masked):
            if not hidden and self.revealed_at[position] is None:  # it was masked in the previous pass
                self.revealed_at[position] = self.last_step
        self.last_step, start = step, len(tokens) - self.model.block
        context = StepContext(
            step=step,
            kind=kind,
            window=range(window.start - start, window.stop - start),
            revealed_at=tuple(self.revealed_at[start:]),
            past=tuple(self.past),
        )
        plan = resolve(self.policy.plan(context), context, self.model.depth)
        if plan.stale and self.literal:
            plan = self.literal_plan
        before, deltas = dict(self.state.inputs), (dict(self.state.attention), dict(self.state.mlp))
        if plan.stale:
            self._count(kind, [0] * self.model.depth)
        else:
            self._count(kind, forward(self.model, tokens, window, plan, self.state, literal=self.literal))
        self.gap = min(self.gap, self.state.gap)
        self.past.append(
            PastPass(window=context.window, plan=plan, measured=self._measured(before, deltas, plan, window))
        )

    def record_guesses(self, guesses: Mapping[int, "Guess"]) -> None:
        """Records the confidence of the last pass's guesses, which later plans of the block may use."""
        start = min(self.state.final) // self.model.block * self.model.block
        confidence = {position - start: each.confidence for position, each in guesses.items()}
        self.past[-1] = replace(self.past[-1], confidence=confidence)

    def _measured(self, before: Cached, deltas: tuple[Cached, Cached], plan: LayerPlan, window: range) -> Measurements:
        """How much the watched layer's input, or what each computed layer adds, changed at each position."""
        spec = self.policy.cache_spec
        watched = spec.watched_layer
        if spec.measures_contributions and before:
            computed = [layer for layer in spec.layers if plan.steps[layer] is COMPUTE]
            now, then = (self.state.attention, self.state.mlp), deltas
            added = {
                (layer, p): [attention[layer, p] + mlp[layer, p] for attention, mlp in (now, then)]
                for layer in computed
                for p in window
            }
            norms = {at: (float((new - old).abs().sum()), float(old.abs().sum())) for at, (new, old) in added.items()}
            return {layer: [norms[layer, p] for p in window] for layer in computed}
        if watched is None or not before:
            return {}
        pairs = [(self.state.inputs[watched, p], before[watched, p]) for p in window]
        return {WATCHED_INPUT: [(float((now - old).abs().sum()), float(old.abs().sum())) for now, old in pairs]}

    def logits(self, position: int) -> Tensor:
        """The logits that predict `position`, from the last pass that computed them."""
        return self.model.logits(self.state.final[position - self.model.shift])

    def _count(self, kind: PassKind, ran: Sequence[Fraction | int]) -> None:
        self.counts[kind.value] += 1
        self.layers["computed"] += sum(positions > 0 for positions in ran)
        self.layers["reused"] += sum(positions == 0 for positions in ran)
        self.layers["positions"] += floor(sum(ran) + Fraction(1, 2))


@dataclass(frozen=True, slots=True)
class Guess:
    """A token chosen from logits; `margin` is the distance to choosing another token."""

    token: int
    confidence: float
    margin: float
    p_V: Tensor  # the softmax, in which the mask has no probability


def guess(logits_V: Tensor, mask: int, settings: DecodeSettings, u: float) -> Guess:
    """The most probable token, or the one that `u` in [0, 1) selects from the nucleus. Never the mask."""
    p_V = (logits_V.float() / settings.temperature if settings.temperature else logits_V).softmax(-1)
    p_V[mask] = 0
    if settings.temperature == 0:
        best, second = p_V.topk(2).values.tolist()
        return Guess(int(p_V.argmax()), best, best - second, p_V)
    sorted_V, tokens_V = p_V.sort(descending=True, stable=True)
    before_V = F.pad(sorted_V.double().cumsum(-1)[:-1], (1, 0))
    kept = sorted_V.double()[before_V < settings.top_p]
    reach = kept.cumsum(-1)
    total = float(reach[-1])
    rank = int((reach > u * total).nonzero()[0])
    return Guess(int(tokens_V[rank]), float(kept[rank]) / total, float((reach / total - u).abs().min()), p_V)


Choice = tuple[list[int], list[float]]  # the indices to reveal, and distances to other choices


def reveal(tokens: list[int], masked: list[int], history: dict[int, list[Guess]], settings: DecodeSettings) -> float:
    """Writes the guesses that the reveal rule accepts; returns the smallest distance to another decision.

    `history` has the guesses of every step at each masked position, the last ones being those of this step.
    """
    traces = [history[position] for position in masked]
    accepted, margins = choose(traces, settings)
    guesses = [trace[-1] for trace in traces]
    for i in accepted:
        tokens[masked[i]] = guesses[i].token
    # A sampled token determines its own confidence, so every sample matters, even if it is not revealed.
    every = settings.temperature > 0 or settings.reveal != "threshold"
    return min(margins + [guesses[i].margin for i in (range(len(guesses)) if every else accepted)])


def choose(traces: list[list[Guess]], settings: DecodeSettings) -> Choice:
    rule, _, value = settings.reveal.partition("=")
    guesses = [trace[-1] for trace in traces]
    confidences = [each.confidence for each in guesses]
    if rule == "threshold":
        return above(confidences, settings.threshold)
    if rule == "margin":
        others = [torch.cat([g.p_V[: g.token], g.p_V[g.token + 1 :]]).max() for g in guesses]
        return above([float(g.p_V[g.token] - other) for g, other in zip(guesses, others, strict=True)], float(value))
    if rule == "credit":
        return above([credited(trace) for trace in traces], float(value))
    if rule == "klass":
        return stable(traces, *(float(part) for part in value.split("+")))
    if rule == "entropy":
        entropies = [-sum(p * log(p) for p in each.p_V.tolist() if p > 0) for each in guesses]
        return longest(sorted(entropies), entropies, lambda first: sum(first) - max(first), float(value), strict=False)
    order = sorted(confidences, reverse=True)
    if rule == "topk":
        return longest(order, confidences, len, int(value), strict=False)
    assert rule == "factor", rule
    return longest(order, confidences, lambda first: (len(first) + 1) * (1 - first[-1]), float(value), strict=True)


def above(scores: list[float], bound: float) -> Choice:
    best = scores.index(max(scores))
    margins = [abs(score - bound) for score in scores] if bound < 1 else []
    if scores[best] <= bound:
        margins += [scores[best] - score for i, score in enumerate(scores) if i != best]
    return [i for i, score in enumerate(scores) if score > bound or i == best], margins


def longest(
    order: list[float], scores: list[float], cost: Callable[[list[float]], float], bound: float, *, strict: bool
) -> Choice:
    """The largest number of scores, in this order, whose cost is within the bound; at least one."""
    costs = [cost(order[:count]) for count in range(1, len(order) + 1)]
    count = max([1, *(n for n, c in enumerate(costs, 1) if c < bound or (c == bound and not strict))])
    descending = order[0] > order[-1]
    left = sorted(range(len(scores)), key=lambda i: (-scores[i] if descending else scores[i], i))[:count]
    border = [abs(order[count - 1] - order[count])] if count < len(order) else []
    return sorted(left), [1.0, *border, *(abs(c - bound) for c in costs[1:] if cost is not len)]


def credited(trace: list[Guess]) -> float:
    """The confidence after its odds grew by the credit of the run of steps that guessed the same token until now."""
    now, run = trace[-1], []
    for earlier in reversed(trace[:-1]):
        if earlier.token != now.token:
            break
        run.append(earlier.confidence)
    credit = sum(confidence * 0.7**age for age, confidence in enumerate(run))
    return 1 / (1 + (1 - now.confidence) / (now.confidence * (1 + credit)))


def stable(traces: list[list[Guess]], confidence: float, divergence: float = 0.01) -> Choice:
    """Confident guesses whose distribution has moved little since the step before, and the most confident guess."""
    accepted, margins = above([trace[-1].confidence for trace in traces], 1.0)
    margins = margins or [1.0]
    for i, trace in enumerate(traces):
        if len(trace) > 1:
            pairs = zip(trace[-1].p_V.tolist(), trace[-2].p_V.tolist(), strict=True)
            moved = sum(p * log(p / max(q, 1e-30)) for p, q in pairs if p > 0)
            margins += [abs(trace[-1].confidence - confidence), abs(moved - divergence)]
            if trace[-1].confidence > confidence and moved < divergence:
                accepted.append(i)
    return sorted(set(accepted)), margins


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceStep:
    """A denoising pass and the tokens of its block after it."""

    block: int
    small: int
    kind: str  # "full" or "small"
    tokens: tuple[int, ...]
    margin: float  # the smallest distance to another decision


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceGenerated:
    ids: tuple[int, ...]  # up to and including the stop token
    finish: str  # "stop" or "length"
    passes: dict[str, int]
    layers: dict[str, int]
    trace: list[ReferenceStep]
    margin: float  # the smallest of all steps, and of the tokens that prefill and commit passes predict
    reveals: list[tuple[int, int, float]]  # of each id: block, step in it (-1: before it), confidence


def reference_generate(
    model: ReferenceModel,
    prompt_ids: Sequence[int],
    *,
    policy: ReusePolicy,
    settings: DecodeSettings,
    subset_size: int | None = None,
    literal: bool = False,
    seed: int = 0,
    whole_blocks: bool = False,
) -> ReferenceGenerated:
    """Continues one prompt. With `whole_blocks`, the last block is denoised completely."""
    assert len(prompt_ids) > 0, "empty prompt"
    assert model.mask not in prompt_ids, "mask in the prompt"
    assert model.block % settings.small_block == 0, settings.small_block
    passes = Passes(model, policy, subset_size, literal)
    generator = torch.Generator().manual_seed(seed)
    tokens, trace, margins = list(prompt_ids), list[ReferenceStep](), list[float]()
    revealed: dict[int, tuple[int, int, float]] = {}
    history: dict[int, list[Guess]] = {}

    def read(logits: list[Tensor]) -> list[Guess]:
        draws = torch.rand(len(logits), generator=generator, dtype=torch.float64).tolist()
        return [guess(logits_V, model.mask, settings, u) for logits_V, u in zip(logits, draws, strict=True)]

    def finish_blocks(kind: PassKind) -> None:
        """Prefill or commit; with token shift, the last position predicts the first token of the next block."""
        logits_V = passes.clean(kind, tokens)
        for first in read([logits_V] * model.shift):
            revealed[len(tokens)] = len(tokens) // model.block, -1, first.confidence
            tokens.append(first.token)
            margins.append(first.margin)

    def end() -> int | None:
        """Position after a stop token with nothing masked before it, or the limit; None if decoding continues."""
        limit = len(prompt_ids) + settings.max_new_tokens
        for position in range(len(prompt_ids), min(limit, len(tokens))):
            if tokens[position] in (model.mask, model.stop):
                return position + 1 if tokens[position] == model.stop else None
        return limit if len(tokens) >= limit else None

    start = len(tokens) // model.block * model.block
    if start == len(tokens):
        finish_blocks(PassKind.PREFILL)
    elif start > 0:
        passes.clean(PassKind.PREFILL, tokens[:start])
    while end() is None:
        block, step = range(start, start + model.block), 0
        tokens += [model.mask] * (block.stop - len(tokens))
        for first in block[:: settings.small_block]:
            small = range(first, first + settings.small_block)
            while (masked := [p for p in small if tokens[p] == model.mask]) and (whole_blocks or end() is None):
                full = not settings.block_cache or step == 0 or (model.shift == 1 and tokens[first] == model.mask)
                kind, window = (PassKind.FULL, block) if full else (PassKind.SMALL, small)
                passes.denoise(tokens, window, kind, step)
                guesses = dict(zip(masked, read([passes.logits(p) for p in masked]), strict=True))
                passes.record_guesses(guesses)
                for position, latest in guesses.items():
                    history.setdefault(position, []).append(latest)
                margin = reveal(tokens, masked, history, settings)
                for p, each in guesses.items():
                    if tokens[p] != model.mask:
                        revealed[p] = start // model.block, step, each.confidence
                done = ReferenceStep(
                    block=start // model.block,
                    small=(first - start) // settings.small_block,
                    kind=kind.value,
                    tokens=tuple(tokens[start:]),
                    margin=margin,
                )
                trace.append(done)
                step += 1
        if end() is None:
            finish_blocks(PassKind.COMMIT)
            start += model.block
    ids = tuple(tokens[len(prompt_ids) : end()])
    return ReferenceGenerated(
        ids=ids,
        finish="stop" if ids[-1] == model.stop else "length",
        passes=passes.counts,
        layers=passes.layers,
        trace=trace,
        margin=min([*margins, *(step.margin for step in trace), SCORE_GAP_FACTOR * passes.gap]),
        reveals=[revealed[position] for position in range(len(prompt_ids), len(prompt_ids) + len(ids))],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceScored:
    score: float
    greedy: bool  # whether every scored token was the most probable one
    rewound: int  # known positions that were masked again before the replay
    passes: dict[str, int]
    layers: dict[str, int]


def reference_score(
    model: ReferenceModel,
    prefix: Sequence[int],
    target: Sequence[int],
    *,
    policy: ReusePolicy,
    method: str = "chain",
    subset_size: int | None = None,
) -> ReferenceScored:
    """The log-likelihood of `target`: of all its tokens ("chain") or of its first ("reference")."""
    assert method in ("chain", "reference"), method
    assert len(prefix) > 0, "empty prefix"
    assert len(target) > 0, "empty target"
    assert model.mask not in (*prefix, *target), "mask in the text"
    passes = Passes(model, policy, subset_size)
    period = passes.policy.period
    assert period is not None, "scoring needs a periodic policy"
    begin, stop = len(prefix), len(prefix) + len(target)
    text = [*prefix, *target, model.stop, *[model.mask] * model.block]
    score, greedy, rewound, step = 0.0, True, 0, 0

    def state(end: int, masked: Sequence[int]) -> list[int]:
        return [model.mask if position in masked else token for position, token in enumerate(text[:end])]

    if begin >= model.block:
        boundary_V = passes.clean(PassKind.PREFILL, text[: begin // model.block * model.block])
    for position in range(begin, stop if method == "chain" else begin + 1):
        start = position // model.block * model.block
        if position == start and position > begin:
            step, boundary_V = 0, passes.clean(PassKind.COMMIT, text[:start])
        if position == start and model.shift:
            logits_V = boundary_V
        else:
            block = range(start, start + model.block)
            hidden = range(position, stop if method == "chain" else begin + 1)
            if position == begin and period > 1 and "small" not in policy.rule.options:  # scoring passes are full
                rewound = min((period - 1) * REVEALED_PER_STEP, begin - start)
                earlier = state(block.stop, [*range(begin - rewound, begin), *hidden, stop])
                passes.denoise(earlier, block, PassKind.FULL, 0)
                step = period - 1
            passes.denoise(state(block.stop, hidden), block, PassKind.FULL, step)
            step, logits_V = step + 1, passes.logits(position)
        score += float(logits_V.log_softmax(-1)[text[position]])
        greedy = greedy and guess(logits_V, model.mask, DecodeSettings(), 0.0).token == text[position]
    return ReferenceScored(score=score, greedy=greedy, rewound=rewound, passes=passes.counts, layers=passes.layers)
