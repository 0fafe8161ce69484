"""Log-likelihoods of targets after prefixes, with the same forward passes and plans as decoding.

Chain scoring sums over the target's tokens from left to right: where token i is read, the tokens before it are
revealed, it and the later ones are masked, and the end-of-text token after the target is visible. Reference scoring
reads the first token only, with the later ones visible. Under a policy of period K the state is rewound and replayed,
so that it is as stale as it would be in decoding.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sampler.config import ModelConfig
from sampler.decode import check_batch_size, check_ids, check_length
from sampler.engine import Engine, OnFailure, Pass, Prefill, RestoreBlock, Row, SaveBlock, slots_needed
from sampler.errors import InputError, NonFiniteError
from sampler.loading import LoadedModel
from sampler.plan import BoundPolicy, CacheSpec, LayerPlan, PassKind, StepContext, compute_all, resolve
from sampler.policy import ReusePolicy
from sampler.records import Counters, Pair, Scored

Answer = tuple[dict[int, float], int]  # log-probabilities of the queried tokens, and the argmax

METHODS = ("chain", "reference")
REWOUND_TOKENS_PER_STEP = 2  # about as many as one denoising step reveals


def score_pairs(
    model: LoadedModel,
    pairs: Sequence[Pair],
    *,
    policy: ReusePolicy,
    method: str = "chain",
    batch_size: int = 1,
    subset_size: int | None = None,
    on_failure: OnFailure | None = None,
) -> Iterator[tuple[int, Scored]]:
    """Scores every pair; yields (index of the pair, score) in order of completion.

    Consecutive pairs with the same prefix form one question: what they share is forwarded once and counted for the
    first of them. Leading blocks that questions share are prefilled once. A question for which the model computes NaN
    or infinity raises NonFiniteError. With `on_failure`, that callback gets the error for each of its pairs instead.
    """
    config = model.config
    bound = policy.bind(config.num_layers, subset_size)
    check_batch_size(batch_size)
    if method not in METHODS:
        raise InputError(f"unknown scoring {method!r}: use {' or '.join(METHODS)}")
    policy.check_scoring()
    check_pairs(pairs, config)
    questions = _questions(pairs)

    def fail_pairs(question: int, error: NonFiniteError) -> None:
        assert on_failure is not None
        for index in questions[question]:
            on_failure(index, error)

    longest = max((len(pair.prefix) + len(pair.target) + 1 for pair in pairs), default=0)
    engine: Engine[list[_TargetScore]] = Engine(
        model.network,
        cache_spec=bound.cache_spec,
        slots=slots_needed(model.network, batch_size, len(questions)),
        capacity=longest,
        reader=LogProbabilities(config.mask_token_id),
        reads=1,
        share_prefixes=True,
        on_failure=None if on_failure is None else fail_pairs,
    )
    rows = (
        _Question(
            document=indices[0],
            prefix=pairs[indices[0]].prefix,
            targets=[pairs[index].target for index in indices],
            config=config,
            policy=bound,
            chain=method == "chain",
        ).score()
        for indices in questions
    )
    for done in engine.run(rows):
        for number, (index, target) in enumerate(zip(questions[done.index], done.result, strict=True)):
            scored = Scored(
                score=target.score,
                greedy=target.greedy,
                rewound=target.rewound,
                counters=done.counters if number == 0 else Counters(),
                started=done.started,
                seconds=done.seconds if number == 0 else 0.0,
            )
            yield index, scored


def check_pairs(pairs: Sequence[Pair], config: ModelConfig) -> None:
    for pair in pairs:
        check_ids(pair.prefix, config, "prefix")
        check_ids(pair.target, config, "target")
        check_length(len(pair.prefix) + len(pair.target), config, "prefix and target")


def _questions(pairs: Sequence[Pair]) -> list[list[int]]:
    """Indices of consecutive pairs with the same prefix."""
    questions: list[list[int]] = []
    for index, pair in enumerate(pairs):
        if questions and pairs[questions[-1][0]].prefix == pair.prefix:
            questions[-1].append(index)
        else:
            questions.append([index])
    return questions


@dataclass(slots=True)
class _TargetScore:
    """The score of one target so far."""

    score: float = 0.0
    greedy: bool = True
    rewound: int = 0


@dataclass(frozen=True, slots=True)
class LogProbabilities:
    """Reads the log-probabilities of the queried tokens, and the argmax, from each row of logits."""

    mask_token_id: int

    def pack(self, queries: Sequence[tuple[int, ...]], block_rows: Sequence[int]) -> Sequence[int]:
        """The row of each queried token, then the tokens."""
        del block_rows
        rows = [row for row, tokens in enumerate(queries) for _ in tokens]
        return [*rows, *(token for tokens in queries for token in tokens)]

    def read(self, logits_PV: Tensor, packed: Tensor) -> Tensor:
        log_PV = torch.log_softmax(logits_PV, -1)
        rows, columns = packed.chunk(2)
        queried = log_PV[rows, columns].double()
        log_PV[:, self.mask_token_id] = float("-inf")
        return torch.cat((queried, log_PV.argmax(-1).double()))

    def unpack(self, numbers: Sequence[float], queries: Sequence[tuple[int, ...]]) -> list[Answer]:
        logs, best = iter(numbers), numbers[sum(map(len, queries)) :]
        return [({token: next(logs) for token in tokens}, int(b)) for tokens, b in zip(queries, best, strict=False)]


@dataclass(kw_only=True)
class _Question:
    """One prefix and its targets, scored as a tree: targets that reach the same state share its forward."""

    document: int
    prefix: tuple[int, ...]
    targets: Sequence[tuple[int, ...]]
    config: ModelConfig
    policy: BoundPolicy
    chain: bool  # score all tokens, not only the first

    def __post_init__(self) -> None:
        self.size = self.config.block_size
        self.scores = [_TargetScore() for _ in self.targets]

    def score(self) -> Row[list[_TargetScore]]:
        """Prefills the prefix, then scores each group of targets that start from the same state."""
        start = len(self.prefix) // self.size * self.size
        at_border = self.config.predicted_at(len(self.prefix)) < start  # prefill predicts the first token
        firsts = tuple(sorted({target[0] for target in self.targets}))
        answers: list[Answer] = []
        groups = self._groups()
        if start:
            then = None if at_border else self._pass_after_prefill(groups[0])
            answers = yield Prefill(tokens=self.prefix[:start], queries=(firsts,) if at_border else (), then=then)
        for members in groups:
            tokens = self._first_state(self.targets[members[0]])
            if at_border:
                self._record(members, 0, answers[0], "prefill")
                yield from self._score_branches(self._branches(members, tokens, 0, 0))
            elif answers and members is groups[0]:
                self._record(members, 0, answers[0], "step 0 (full pass)")
                yield from self._score_branches(self._branches(members, tokens, 0, 1))
            else:
                step = yield from self._rewind(members, tokens)
                yield from self._score_branches([_Branch(members, tokens, 0, step)])
        return self.scores

    def _pass_after_prefill(self, members: Sequence[int]) -> Pass | None:
        """The pass that reads the first token, if it can run together with the prefill: it must replay nothing."""
        if self.policy.cache_spec != CacheSpec() or self.policy.period != 1:
            return None
        queried = tuple(sorted({self.targets[index][0] for index in members}))
        return self._pass(self._first_state(self.targets[members[0]]), len(self.prefix), 0, queried)

    def _groups(self) -> list[list[int]]:
        """Targets grouped by the state in which their first token is read: same length, same visible tokens."""
        groups: dict[object, list[int]] = {}
        for index, target in enumerate(self.targets):
            groups.setdefault((len(target), () if self.chain else target[1:]), []).append(index)
        return list(groups.values())

    def _first_state(self, target: tuple[int, ...]) -> list[int]:
        """The whole sequence with the target's first token masked, padded with masks to the end of its block."""
        mask = self.config.mask_token_id
        hidden = (mask,) * len(target) if self.chain else (mask, *target[1:])
        tokens = [*self.prefix, *hidden, self.config.eos_token_ids[0]]
        return tokens + [mask] * (-len(tokens) % self.size)

    def _rewind(self, members: Sequence[int], tokens: list[int]) -> Row[int]:
        """Computes an earlier state of the block; returns the step at which the first token is read."""
        period, first = self.policy.period, len(self.prefix)
        assert period is not None
        if not self._plan(tokens, first, period - 1)[0].replays:
            return 0
        known = min((period - 1) * REWOUND_TOKENS_PER_STEP, first % self.size)
        earlier = list(tokens)
        for position in (*range(first - known, first), first + len(self.targets[members[0]])):
            earlier[position] = self.config.mask_token_id
        yield self._pass(earlier, first, 0)
        for index in members:
            self.scores[index].rewound = known
        return period - 1

    def _score_branches(self, branches: "list[_Branch]") -> Row[None]:
        """Depth first, so that the slot holds the state of one path; a fork saves it for its other branches."""
        while branches:
            branch = branches.pop()
            position = len(self.prefix) + branch.token
            if branch.saved is not None:
                yield RestoreBlock(position // self.size * self.size, branch.saved)
            queried = tuple(sorted({self.targets[index][branch.token] for index in branch.members}))
            answers, step, source = [], branch.step, "commit pass"
            if branch.token and position % self.size == 0:  # the target enters a new block
                answers = yield self._commit(branch.tokens, position - self.size, queried)
                step = 0
            if not answers:
                answers = yield self._pass(branch.tokens, position, step, queried)
                source = f"step {step} (full pass)"
                step += 1
            self._record(branch.members, branch.token, answers[0], source)
            forks = self._branches(branch.members, branch.tokens, branch.token, step)
            if len(forks) > 1 and self.policy.cache_spec != CacheSpec() and (position + 1) % self.size and step:
                saved = yield SaveBlock(position // self.size * self.size)
                forks[:-1] = [replace(fork, saved=saved) for fork in forks[:-1]]
            branches += forks

    def _branches(self, members: Sequence[int], tokens: list[int], token: int, step: int) -> "list[_Branch]":
        """The branches after token `token`: one for each value that it has in these targets."""
        if not self.chain or token + 1 == len(self.targets[members[0]]):
            return []
        by_value: dict[int, list[int]] = {}
        for index in members:
            by_value.setdefault(self.targets[index][token], []).append(index)
        position = len(self.prefix) + token
        return [
            _Branch(indices, [*tokens[:position], value, *tokens[position + 1 :]], token + 1, step)
            for value, indices in by_value.items()
        ]

    def _plan(self, tokens: list[int], position: int, step: int) -> tuple[LayerPlan, LayerPlan]:
        """The plan that the policy requests for the block of `position`, and the plan to execute."""
        start = position // self.size * self.size
        masked = [token == self.config.mask_token_id for token in tokens[start : start + self.size]]
        context = StepContext(
            step=step,
            kind=PassKind.FULL,
            window=range(self.size),
            revealed_at=tuple(None if hidden else -1 for hidden in masked),
        )
        requested = self.policy.plan(context)
        return requested, resolve(requested, context, self.config.num_layers)

    def _pass(self, tokens: list[int], position: int, step: int, queried: tuple[int, ...] = ()) -> Pass:
        """A full pass over the block of `position`, which reads where its token is predicted."""
        start = position // self.size * self.size
        requested, executed = self._plan(tokens, position, step)
        return Pass(
            kind=PassKind.FULL,
            start=start,
            tokens=tokens[start : start + self.size],
            plan=executed,
            opens_block=step == 0,
            eligible=requested.replays,
            read=(self.config.predicted_at(position) - start,) if queried else (),
            queries=(queried,) if queried else (),
        )

    def _commit(self, tokens: list[int], start: int, queried: tuple[int, ...]) -> Pass:
        """Commits a block. If tokens are shifted, its last position predicts the first token of the next block."""
        predictions = self.config.boundary_predictions
        return Pass(
            kind=PassKind.COMMIT,
            start=start,
            tokens=tokens[start : start + self.size],
            plan=compute_all(self.config.num_layers),
            read=(self.size - 1,) * predictions,
            queries=(queried,) * predictions,
        )

    def _record(self, members: Sequence[int], token: int, answer: Answer, source: str) -> None:
        """Adds the log-probability of token `token` to the scores; `source` is the pass that predicted it."""
        logs, best = answer
        for value in logs.values():
            if not math.isfinite(value):
                block = self.config.predicted_at(len(self.prefix) + token) // self.size
                raise NonFiniteError(self.document, block, source, f"a log-likelihood of {value}")
        for index in members:
            expected = self.targets[index][token]
            self.scores[index].score += logs[expected]
            self.scores[index].greedy &= best == expected


@dataclass(frozen=True, slots=True)
class _Branch:
    """Targets that agree so far, the sequence with their tokens revealed, and the index of the next token to read."""

    members: Sequence[int]
    tokens: list[int]
    token: int
    step: int
    saved: Any = None
