"""Why a speed-up is what it is: what the policy could save at best, what it saved, and where the rest went.

Each factor is a ratio against k=1: passes per token, layers per pass, and a rest that these counters do not explain
(time outside the layers, kernel launches). Their product is the measured speed-up.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

from orchestrator.analysis.columns import Array, group_codes
from orchestrator.analysis.intervals import CONFIDENCE, Estimate
from orchestrator.analysis.runs import PASS_KINDS, ResolvedConfiguration, TaskRuns
from orchestrator.core.speed import ideal_speedup

COST_COUNTERS = (*(f"passes_{kind}" for kind in PASS_KINDS), "layers_computed", "layer_positions", "tokens")
MIN_SPARE_TRIALS = 8  # more trials than counters
SINGULAR = 1e-7  # singular values below this share of the largest one count as 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Ratios against k=1, above 1 is a gain. passes × layers × unexplained = measured."""

    ideal: float | None  # the policy's layers left out of all but every k-th denoising pass, nothing else changed
    measured: float  # of tokens/s, calibrated
    passes: float  # passes per token: below 1 means more of them
    layers: float  # layers computed per pass
    unexplained: float
    from_executions: float  # what layer executions alone would give: passes × layers
    from_positions: float  # what layer-positions alone would give
    sentence: str


def explain(
    rows: TaskRuns,
    runs: Array,
    baseline: Array,
    configuration: ResolvedConfiguration,
    measured: float,
    model: Mapping[str, Any],
) -> Explanation | None:
    """None if the two sides share no document, or one generated no token."""
    both = rows.present(runs) & rows.present(baseline)
    ours, base = _sums(rows, runs, both), _sums(rows, baseline, both)
    if not all(side[name] > 0 for side in (ours, base) for name in ("tokens", "passes", "layers_computed")):
        return None
    passes, positions, executions = (
        (base[name] / base["tokens"]) / (ours[name] / ours["tokens"])
        for name in ("passes", "layer_positions", "layers_computed")
    )
    layers = executions / passes
    depth = depth_of(model, base)
    skipped = (depth or 0) if configuration.mode == "output" else len(configuration.layers)
    ideal = ideal_speedup(configuration.k, skipped, depth)
    unexplained = measured / executions
    replayed, denoising = ours["replayed"] / max(1.0, ours["steps"]), ours["steps"] / ours["passes"]
    target = "" if ideal is None else f" (ideal: {ideal:.2f}×)"
    return Explanation(
        ideal=ideal,
        measured=measured,
        passes=passes,
        layers=layers,
        unexplained=unexplained,
        from_executions=executions,
        from_positions=positions,
        sentence=f"{configuration.label} runs at {measured:.2f}× the speed of k=1{target}: "
        f"it computed {_change(1 / layers)} layers per pass ({replayed:.0%} of its denoising passes replayed some; "
        f"prefill and commit passes, {1 - denoising:.0%} of all, never do); "
        f"it took {_change(1 / passes)} passes per token; "
        f"the counters do not explain ×{unexplained:.2f}.",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Calibrated time of a trial as a linear function of its counters, fitted over all trials of a task."""

    coefficients: Array
    covariance: Array
    lack_of_fit: float | None  # p-value: small if configurations deviate from the model by more than their trials vary


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelledSpeedup:
    """A speed-up in tokens/s that the cost model predicts for these documents. It decides nothing."""

    tokens: Estimate
    lack_of_fit: float | None


def fit_cost_model(rows: TaskRuns) -> CostModel | None:
    """Weighted least squares with errors proportional to the time; None with fewer than MIN_SPARE_TRIALS to spare."""
    cells = rows.timed[rows.timed >= 0]
    trial, trials = group_codes(rows.columns["trial_id"][cells])
    counters = np.stack(
        [np.bincount(trial, weights=rows.columns[name][cells], minlength=trials) for name in COST_COUNTERS], axis=1
    )
    work = np.bincount(trial, weights=rows.columns["work"][cells], minlength=trials)
    owner = np.zeros(trials, dtype=np.int64)
    is_k1 = np.array([one.is_baseline for one in rows.configurations])
    configuration = rows.owner[rows.run[cells]]
    owner[trial] = np.where(is_k1[configuration], -1, configuration)
    if not (work > 0).all() or trials < len(COST_COUNTERS) + MIN_SPARE_TRIALS:
        return None
    predicted = work
    for _ in range(2):
        coefficients, squares, rank, inverse = _least_squares(counters / predicted[:, None], work / predicted)
        predicted = np.maximum(counters @ coefficients, 0.1 * work)
    names, group = np.unique(owner, return_inverse=True)
    shifts = (group.reshape(-1)[:, None] == np.arange(len(names))).astype(float)
    design, target = counters / predicted[:, None], work / predicted
    _, squares, rank, inverse = _least_squares(design, target)
    _, left, full_rank, _ = _least_squares(np.concatenate((design, shifts), axis=1), target)
    p_value = None
    if full_rank > rank and trials > full_rank and left > 0:
        ratio = (squares - left) / (full_rank - rank) / (left / (trials - full_rank))
        p_value = float(special.fdtrc(full_rank - rank, trials - full_rank, max(0.0, ratio)))
    return CostModel(
        coefficients=coefficients, covariance=inverse * squares / max(1, trials - rank), lack_of_fit=p_value
    )


def _least_squares(design: Array, target: Array) -> tuple[Array, float, int, Array]:
    """Coefficients, sum of squared residuals, rank and the pseudo-inverse of the normal matrix."""
    largest = np.abs(design).max(axis=0)
    scale = np.where(largest > 0, largest, 1.0)
    scaled = design / scale
    inverse = np.linalg.pinv(scaled, rtol=SINGULAR) / scale[:, None]
    coefficients, rank = inverse @ target, int(np.linalg.matrix_rank(scaled, rtol=SINGULAR))
    residuals = target - design @ coefficients
    return coefficients, float(residuals @ residuals), rank, inverse @ inverse.T


def modelled_speedup(model: CostModel, rows: TaskRuns, runs: Array, baseline: Array) -> ModelledSpeedup | None:
    """None if the two sides share no document, or the model predicts no time for one of them."""
    both = rows.present(runs) & rows.present(baseline)
    own, base = (np.array([rows.mean(side, name)[both].sum() for name in COST_COUNTERS]) for side in (runs, baseline))
    times = [float(side @ model.coefficients) for side in (own, base)]
    tokens = [float(side[COST_COUNTERS.index("tokens")]) for side in (own, base)]
    if not both.any() or min(times) <= 0 or min(tokens) <= 0:
        return None
    value = float(np.log(times[1] / times[0] * tokens[0] / tokens[1]))
    slope = base / times[1] - own / times[0]
    half = float(special.ndtri((1 + CONFIDENCE) / 2)) * math.sqrt(max(0.0, float(slope @ model.covariance @ slope)))
    return ModelledSpeedup(
        tokens=Estimate(value=value, low=value - half, high=value + half).exp(), lack_of_fit=model.lack_of_fit
    )


def _change(ratio: float) -> str:
    return "as many" if abs(ratio - 1) < 0.005 else f"{abs(ratio - 1):.0%} {'more' if ratio > 1 else 'fewer'}"


def _sums(rows: TaskRuns, runs: Array, documents: Array) -> dict[str, float]:
    names = ("tokens", "passes", "layers_computed", "layer_positions", "replayed", "steps")
    return {name: float(rows.mean(runs, name)[documents].sum()) for name in names}


def depth_of(model: Mapping[str, Any], base: Mapping[str, float] | None = None) -> int | None:
    """The model's number of layers: as recorded, else as k=1 computed them in each pass."""
    stated = model.get("depth", model.get("num_layers"))
    if stated:
        return int(stated)
    return round(base["layers_computed"] / base["passes"]) if base and base["passes"] else None


def flops_per_token(positions_per_token: float | None, model: Mapping[str, Any]) -> float | None:
    """Two operations per weight of the layers that ran; excludes attention over the context and the head."""
    weights = _weights_per_layer(model)
    return None if weights is None or positions_per_token is None else 2 * weights * positions_per_token


def _weights_per_layer(model: Mapping[str, Any]) -> float | None:
    """Attention and MLP weights as recorded, else an even share of all parameters."""
    if model.get("layer_weights"):
        return float(sum(model["layer_weights"]))
    depth, parameters = depth_of(model), model.get("parameters")
    return parameters / depth if depth and isinstance(parameters, int | float) else None
