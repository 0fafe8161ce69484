"""The training loop: schedule, gradients on one or two threads, and the optimizer.

The optimizer is Muon for matrices and Adam for everything else, with all state in named tensors that a checkpoint can
hold. Muon takes the momentum of a matrix's gradient and makes all its singular values nearly one (five Newton–Schulz
iterations), so that every direction moves equally far.
"""

import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from sampler.config import ModelConfig
from tools.tiny.batches import Batches, Shard
from tools.tiny.network import Network, Weights, grow_layers, matrix_parts, new_weights

MATRIX_LEARNING_RATE, OTHER_LEARNING_RATE = 0.012, 0.003
MOMENTUM = 0.95
BETAS = (0.9, 0.98)
EPSILON = 1e-8
GRADIENT_CLIP_NORM = 1.0  # of all weights that are not stacked matrices
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_ITERATIONS = 5
WARM_UP_SHARE = 0.01  # of the schedule: the learning rate rises, at the start and after growing
FLAT_SHARE = 0.6  # of the schedule: then the learning rate falls linearly to zero
GROWTH_FACTOR = 3  # more layers each time the network grows
GROWS_AT = (0.2, 0.6)  # of the schedule; what is learned first needs many steps and little depth
DEPTH_RATIO = GROWTH_FACTOR ** len(GROWS_AT)
LIKE_DECODING_SHARE = (0.3, 0.7)  # of answers masked as in decoding, at the start and at the end


class Optimizer:
    """Updates weights in place. `parts` has the stacked matrices and the rows of the matrices fused into each."""

    def __init__(self, weights: Mapping[str, Tensor], parts: Mapping[str, Sequence[int]]) -> None:
        self.parts = parts
        self.state = {f"momentum.{name}": torch.zeros_like(weights[name]) for name in parts}
        for name in weights.keys() - parts.keys():
            self.state[f"mean.{name}"] = torch.zeros_like(weights[name])
            self.state[f"square.{name}"] = torch.zeros_like(weights[name])

    @torch.no_grad()
    def step(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], number: int, scale: float) -> None:
        """`number` counts steps from 0; `scale` is the schedule's factor on the learning rates."""
        for name, rows in self.parts.items():
            momentum = self.state[f"momentum.{name}"]
            momentum.lerp_(gradients[name], 1 - MOMENTUM)
            ahead = gradients[name].lerp(momentum, MOMENTUM)
            for part, direction in zip(
                torch.split(weights[name], list(rows), 1), torch.split(ahead, list(rows), 1), strict=True
            ):
                tall = max(1.0, part.shape[1] / part.shape[2]) ** 0.5
                part.add_(orthogonal(direction), alpha=-MATRIX_LEARNING_RATE * scale * tall)
        self._adam(weights, gradients, number, scale)

    def _adam(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], number: int, scale: float) -> None:
        names = [name for name in weights if name not in self.parts]
        length = torch.stack([gradients[name].norm() for name in names]).norm()
        shrink = float(torch.clamp(GRADIENT_CLIP_NORM / (length + 1e-6), max=1.0))
        for name in names:
            mean, square = self.state[f"mean.{name}"], self.state[f"square.{name}"]
            gradient = gradients[name] * shrink
            mean.lerp_(gradient, 1 - BETAS[0])
            square.lerp_(gradient.square(), 1 - BETAS[1])
            corrected = [1 - beta ** (number + 1) for beta in BETAS]
            spread = (square / corrected[1]).sqrt_().add_(EPSILON)
            weights[name].addcdiv_(mean, spread, value=-OTHER_LEARNING_RATE * scale / corrected[0])


def orthogonal(matrices: Tensor) -> Tensor:
    """Matrices with the same singular vectors and all singular values near one."""
    wide = matrices.transpose(-1, -2) if matrices.shape[-2] > matrices.shape[-1] else matrices
    x: Tensor = wide / (torch.linalg.matrix_norm(wide, keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_ITERATIONS):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(-1, -2) if matrices.shape[-2] > matrices.shape[-1] else x


@dataclass(frozen=True, slots=True)
class StepReport:
    loss: float
    hits: float  # share of the weight of all predictions that is on correct ones
    examples: int


def learning_rate(position: float) -> float:
    """The schedule's factor on the learning rates; `position` runs from 0 to 1."""
    since = position - max((at for at in GROWS_AT if position >= at), default=0.0)
    rise = min(1.0, (since + 1e-3) / WARM_UP_SHARE)
    return rise * min(1.0, max(0.0, 1 - position) / (1 - FLAT_SHARE))


class Trainer:
    """Weights and optimizer of one run; a step depends only on them, its number and the schedule's position."""

    def __init__(
        self, config: ModelConfig, batches: Batches, *, seed: int, threads: int = 1, compiled: bool = False
    ) -> None:
        """`config` is that of the finished network; its number of layers is a multiple of `DEPTH_RATIO`."""
        self.config, self.batches, self.threads = config, batches, threads
        self.parts = matrix_parts(config)
        shallow = replace(config, num_layers=config.num_layers // DEPTH_RATIO)
        self.weights = new_weights(shallow, torch.Generator().manual_seed(seed))
        self.optimizer = Optimizer(self.weights, self.parts)
        self.network = Network(config, compiled=compiled)
        self.number = 0  # steps
        self.grew_at = 0  # the step before which the network grew last
        torch.set_num_threads(1)  # a shard runs on one thread: its matrix products are too small to be split
        self.pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def step(self, position: float) -> StepReport:
        while self.depth < self._depth_at(position):
            self._grow(self.number)
        share = LIKE_DECODING_SHARE[0] + (LIKE_DECODING_SHARE[1] - LIKE_DECODING_SHARE[0]) * position
        shards = self.batches.shards(self.number, share)
        total = float(sum(shard.weight_M.sum() for shard in shards))
        if self.threads > 1 and self.number > 0:
            results = list(self.pool.map(lambda shard: self.gradients(shard, total), shards))
        else:  # the first step compiles, which only one thread can do
            results = [self.gradients(shard, total) for shard in shards]
        summed = {name: torch.stack([gradients[name] for _, _, gradients in results]).sum(0) for name in self.weights}
        self.optimizer.step(self.weights, summed, self.number - self.grew_at, learning_rate(position))
        self.number += 1
        return StepReport(
            loss=sum(loss for loss, _, _ in results),
            hits=sum(hits for _, hits, _ in results),
            examples=sum(shard.examples for shard in shards),
        )

    def gradients(self, shard: Shard, total: float) -> tuple[float, float, dict[str, Tensor]]:
        """The shard's parts of the loss, the hits and the gradient, which `step` adds up in the order of the shards."""
        leaves: Weights = {name: weight.detach().requires_grad_() for name, weight in self.weights.items()}
        logits_MV = self.network.logits(leaves, shard.blocks, shard.at_M)
        each_M = cross_entropy(logits_MV, shard.target_M, reduction="none")
        loss = (each_M * shard.weight_M).sum() / total
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        hits = ((logits_MV.argmax(-1) == shard.target_M) * shard.weight_M).sum() / total
        return float(loss.detach()), float(hits), dict(zip(leaves, gradients, strict=True))

    def state(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint."""
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
        remaining = sum(position < at for at in GROWS_AT)
        return int(self.config.num_layers // GROWTH_FACTOR**remaining)

    def _grow(self, number: int) -> None:
        """Adds layers and resets the optimizer."""
        self.weights = grow_layers(self.weights, GROWTH_FACTOR)
        self.optimizer = Optimizer(self.weights, self.parts)
        self.grew_at = number


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """The length of a run: in steps, or in minutes."""

    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        assert (self.steps is None) != (self.minutes is None)

    def position(self, step: int, seconds: float) -> float:
        """Position in the schedule, from 0 to 1."""
        if self.steps is not None:
            return step / self.steps
        assert self.minutes is not None
        return seconds / (60 * self.minutes)


class Stopwatch:
    """Seconds since it was created, added to those of earlier runs."""

    def __init__(self, before: float) -> None:
        self.before, self.began = before, time.monotonic()

    def seconds(self) -> float:
        return self.before + time.monotonic() - self.began


def has_compiler(commands: Sequence[str] = ("c++", "g++", "clang++")) -> bool:
    return any(shutil.which(command) for command in commands)
