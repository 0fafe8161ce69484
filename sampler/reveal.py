"""From logits to tokens: predictions at masked positions, and which of them a step reveals. Pure functions.

Shapes: N positions, V vocabulary. The mask id is never predicted, but its probability stays in the softmax.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Prediction:
    """The token a position would take and how sure the model is of it."""

    token: int
    probability: float


def reveal(predictions: Sequence[Prediction], threshold: float) -> list[int]:
    """Indices to reveal: all strictly above the threshold, and always the most probable (ties: the lowest)."""
    best = max(range(len(predictions)), key=lambda i: predictions[i].probability)
    return [i for i, p in enumerate(predictions) if p.probability > threshold or i == best]


@dataclass(frozen=True, kw_only=True, slots=True)
class Predictor:
    """Reads predictions off logits: the argmax at temperature 0, else a draw from the nucleus.

    A draw uses the uniform number that comes with each position, so a row's tokens never depend on its batch.
    """

    mask_token_id: int
    temperature: float = 0.0
    top_p: float = 1.0

    def __call__(self, logits_NV: Tensor, uniforms: Sequence[float]) -> list[Prediction]:
        probability_N, token_N = self._drawn(logits_NV, uniforms) if self.temperature else self._greedy(logits_NV)
        # One transfer, and so one synchronisation; float64 holds every token id exactly.
        probabilities, tokens = torch.stack((probability_N.double(), token_N.double())).tolist()
        return [Prediction(int(token), p) for token, p in zip(tokens, probabilities, strict=True)]

    def _greedy(self, logits_NV: Tensor) -> tuple[Tensor, Tensor]:
        probability_NV = self._without_mask(torch.softmax(logits_NV, -1))
        return probability_NV.max(-1)

    def _drawn(self, logits_NV: Tensor, uniforms: Sequence[float]) -> tuple[Tensor, Tensor]:
        probability_NV = self._without_mask(torch.softmax(logits_NV / self.temperature, -1))
        sorted_NV, token_NV = probability_NV.sort(stable=True, dim=-1, descending=True)
        before_NV = sorted_NV.double().cumsum(-1) - sorted_NV
        kept_NV = torch.where(before_NV < self.top_p, sorted_NV.double(), 0.0)
        reached_NV = kept_NV.cumsum(-1)
        goal_N1 = torch.tensor(uniforms, dtype=torch.float64, device=logits_NV.device)[:, None] * reached_NV[:, -1:]
        drawn_N1 = (reached_NV > goal_N1).int().argmax(-1, keepdim=True)
        chance_N1 = kept_NV.gather(-1, drawn_N1) / reached_NV[:, -1:]
        return chance_N1[:, 0], token_NV.gather(-1, drawn_N1)[:, 0]

    def _without_mask(self, probability_NV: Tensor) -> Tensor:
        probability_NV[:, self.mask_token_id] = 0
        return probability_NV
