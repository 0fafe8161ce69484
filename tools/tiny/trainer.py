"""The training loop: batches, gradients on one or two threads, steps, schedule. Knows no files and no text."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from sampler.config import ModelConfig
from tools.tiny.batches import Batches, Shard
from tools.tiny.network import Network, Weights, grown, matrix_parts, new_weights
from tools.tiny.optimizer import Optimizer

WARM_UP = 0.01  # share of the schedule in which the learning rate rises, at the start and after growing
FLAT = 0.6  # share after which it falls, linearly to zero
GROWTH = 3  # times as many layers, each time the network grows
GROWS_AT = (0.2, 0.6)  # shares at which it does: what is learned first needs many steps and little depth
SHALLOWER = GROWTH ** len(GROWS_AT)
LIKE_DECODING = (0.3, 0.7)  # share of answers masked as in decoding, at the start and at the end


@dataclass(frozen=True, slots=True)
class Report:
    """What a step did."""

    loss: float
    hits: float  # share of the predictions that were right
    examples: int


def learning_rate(position: float) -> float:
    """The schedule's share of the learning rates, `position` running from 0 to 1."""
    since = position - max((at for at in GROWS_AT if position >= at), default=0.0)
    rise = min(1.0, (since + 1e-3) / WARM_UP)
    return rise * min(1.0, max(0.0, 1 - position) / (1 - FLAT))


class Trainer:
    """Weights and optimizer of one run; every step is a function of them, its number and the schedule's position."""

    def __init__(
        self, config: ModelConfig, batches: Batches, *, seed: int, threads: int = 1, compiled: bool = False
    ) -> None:
        """`config` is that of the finished network, which has a multiple of `SHALLOWER` layers."""
        self.config, self.batches, self.threads = config, batches, threads
        self.parts = matrix_parts(config)
        shallow = replace(config, num_layers=config.num_layers // SHALLOWER)
        self.weights = new_weights(shallow, torch.Generator().manual_seed(seed))
        self.optimizer = Optimizer(self.weights, self.parts)
        self.network = Network(config, compiled=compiled)
        self.number = 0  # steps
        self.grew_at = 0  # the step before which the network grew last
        torch.set_num_threads(1)  # a shard is one thread's work: its products are too small to be shared out
        self.pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def step(self, position: float) -> Report:
        """One step at this position of the schedule."""
        while self.depth < self._depth_at(position):
            self._grow(self.number)
        share = LIKE_DECODING[0] + (LIKE_DECODING[1] - LIKE_DECODING[0]) * position
        shards = self.batches.shards(self.number, share)
        total = float(sum(shard.weight_M.sum() for shard in shards))
        if self.threads > 1 and self.number > 0:
            results = list(self.pool.map(lambda shard: self.gradients(shard, total), shards))
        else:  # the first step compiles, which only one thread may do
            results = [self.gradients(shard, total) for shard in shards]
        summed = {name: torch.stack([gradients[name] for _, _, gradients in results]).sum(0) for name in self.weights}
        self.optimizer.step(self.weights, summed, self.number - self.grew_at, learning_rate(position))
        self.number += 1
        return Report(
            loss=sum(loss for loss, _, _ in results),
            hits=sum(hits for _, hits, _ in results),
            examples=sum(shard.examples for shard in shards),
        )

    def gradients(self, shard: Shard, total: float) -> tuple[float, float, dict[str, Tensor]]:
        """The shard's share of the loss, of the hits, and of the gradient; always summed in the same order."""
        leaves: Weights = {name: weight.detach().requires_grad_() for name, weight in self.weights.items()}
        logits_MV = self.network.logits(leaves, shard.blocks, shard.at_M)
        each_M = cross_entropy(logits_MV, shard.target_M, reduction="none")
        loss = (each_M * shard.weight_M).sum() / total
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        hits = ((logits_MV.argmax(-1) == shard.target_M) * shard.weight_M).sum() / total
        return float(loss.detach()), float(hits), dict(zip(leaves, gradients, strict=True))

    def state(self) -> dict[str, Tensor]:
        """Everything a checkpoint must hold besides the number of steps."""
        return {f"weights.{name}": weight for name, weight in self.weights.items()} | self.optimizer.state

    def restore(self, tensors: Mapping[str, Tensor], number: int, grew_at: int) -> None:
        while self.depth < len(tensors["weights.qkv"]):
            self._grow(grew_at)
        for name, tensor in self.state().items():
            tensor.copy_(tensors[name])
        self.number = number

    @property
    def depth(self) -> int:
        return int(self.weights["qkv"].shape[0])

    def _depth_at(self, position: float) -> int:
        still = sum(position < at for at in GROWS_AT)
        return int(self.config.num_layers // GROWTH**still)

    def _grow(self, number: int) -> None:
        """Deeper, with a fresh optimizer."""
        self.weights = grown(self.weights, GROWTH)
        self.optimizer = Optimizer(self.weights, self.parts)
        self.grew_at = number


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How long a run is: in steps, or in minutes on the clock."""

    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        assert (self.steps is None) != (self.minutes is None)

    def position(self, step: int, seconds: float) -> float:
        """Where a run is in its schedule, from 0 to 1."""
        if self.steps is not None:
            return step / self.steps
        assert self.minutes is not None
        return seconds / (60 * self.minutes)


class Stopwatch:
    """Seconds since it was made, on top of those of earlier runs."""

    def __init__(self, before: float) -> None:
        self.before, self.began = before, time.monotonic()

    def seconds(self) -> float:
        return self.before + time.monotonic() - self.began


def compiler_at_hand(commands: Sequence[str] = ("c++", "g++", "clang++")) -> bool:
    import shutil

    return any(shutil.which(command) for command in commands)
