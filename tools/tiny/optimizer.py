"""Muon for matrices, Adam for everything else, with all state in named tensors that a checkpoint can hold.

Muon takes the momentum of a matrix's gradient and makes all its singular values nearly one (five steps of a
Newton–Schulz iteration), so that every direction moves equally far.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

MATRIX_RATE, OTHER_RATE = 0.012, 0.003
MOMENTUM = 0.95
BETAS = (0.9, 0.98)
EPSILON = 1e-8
LONGEST_GRADIENT = 1.0  # of everything that is no stacked matrix, taken together
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ROUNDS = 5


class Optimizer:
    """Changes weights in place. `parts` names the stacked matrices and the rows of the matrices fused in each."""

    def __init__(self, weights: Mapping[str, Tensor], parts: Mapping[str, Sequence[int]]) -> None:
        self.parts = parts
        self.state = {f"momentum.{name}": torch.zeros_like(weights[name]) for name in parts}
        for name in weights.keys() - parts.keys():
            self.state[f"mean.{name}"] = torch.zeros_like(weights[name])
            self.state[f"square.{name}"] = torch.zeros_like(weights[name])

    @torch.no_grad()
    def step(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], number: int, scale: float) -> None:
        """`number` counts steps from 0; `scale` is the schedule's share of the learning rates."""
        for name, rows in self.parts.items():
            momentum = self.state[f"momentum.{name}"]
            momentum.lerp_(gradients[name], 1 - MOMENTUM)
            ahead = gradients[name].lerp(momentum, MOMENTUM)
            for part, direction in zip(
                torch.split(weights[name], list(rows), 1), torch.split(ahead, list(rows), 1), strict=True
            ):
                tall = max(1.0, part.shape[1] / part.shape[2]) ** 0.5
                part.add_(orthogonal(direction), alpha=-MATRIX_RATE * scale * tall)
        self._adam(weights, gradients, number, scale)

    def _adam(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], number: int, scale: float) -> None:
        names = [name for name in weights if name not in self.parts]
        length = torch.stack([gradients[name].norm() for name in names]).norm()
        shrink = float(torch.clamp(LONGEST_GRADIENT / (length + 1e-6), max=1.0))
        for name in names:
            mean, square = self.state[f"mean.{name}"], self.state[f"square.{name}"]
            gradient = gradients[name] * shrink
            mean.lerp_(gradient, 1 - BETAS[0])
            square.lerp_(gradient.square(), 1 - BETAS[1])
            corrected = [1 - beta ** (number + 1) for beta in BETAS]
            spread = (square / corrected[1]).sqrt_().add_(EPSILON)
            weights[name].addcdiv_(mean, spread, value=-OTHER_RATE * scale / corrected[0])


def orthogonal(matrices: Tensor) -> Tensor:
    """Matrices with the same singular vectors and all singular values near one."""
    wide = matrices.transpose(-1, -2) if matrices.shape[-2] > matrices.shape[-1] else matrices
    x: Tensor = wide / (torch.linalg.matrix_norm(wide, keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(ROUNDS):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(-1, -2) if matrices.shape[-2] > matrices.shape[-1] else x
