"""What a configuration computes per token against k=1: why its speed-up is what it is, and how it ranks.

An explanation splits a measured speed-up into factors: passes per token, layers per pass, and a rest that the counters
do not explain (time outside the layers, kernel launches). Their product is the measured speed-up.

The ranking puts all configurations of a task on the same axes: accuracy, and tokens/s, layer executions or
layer-positions, each against k=1 at the task's first decode settings. Decode settings and policies are ranked together,
because k=1 gets faster too with a lower threshold or a larger small block, and a policy has to beat that.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import special

from orchestrator.analysis.accuracy import paired_difference
from orchestrator.analysis.columns import Array
from orchestrator.analysis.intervals import CONFIDENCE, Estimate
from orchestrator.analysis.runs import PASS_KINDS, ResolvedConfiguration, TaskRuns
from orchestrator.core.configuration import DECODE_SETTINGS, Configuration
from orchestrator.core.speed import group_codes, ideal_speedup

COST_COUNTERS = (*(f"passes_{kind}" for kind in PASS_KINDS), "layers_computed", "layer_positions", "tokens")
MIN_SPARE_TRIALS = 8  # more trials than counters
SINGULAR = 1e-7  # singular values below this share of the largest one count as 0
MAX_SHARD_RATIOS = 400  # per configuration

SPEED, EXECUTIONS, POSITIONS = "tokens/s", "layer executions", "layer-positions"
AXES = (SPEED, EXECUTIONS, POSITIONS)

REFERENCE = "k=1"
SEVERAL_SETTINGS = "several decode settings"
GRID, OUTPUT = "fixed grid", "output mode"
RULES = (
    "adaptive",
    "trim",
    "trim, random",
    "mlp",
    "attn",
    "skip",
    "stale",
    "delayed",
    "dllm",
    "elastic",
    "es",
    "focus",
)
SETTING_FAMILIES = tuple(name.replace("_", " ") for name in DECODE_SETTINGS)
FAMILIES = (REFERENCE, *SETTING_FAMILIES, SEVERAL_SETTINGS, GRID, OUTPUT, *RULES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Ratios against k=1; above 1 is a gain. passes × layers × unexplained = measured."""

    ideal: float | None  # if the policy's layers ran only in every k-th denoising pass and nothing else changed
    measured: float  # of tokens/s, calibrated
    passes: float  # passes per token: below 1 means more of them
    layers: float  # layers computed per pass
    unexplained: float  # the rest
    from_executions: float  # speed-up if time were proportional to layer executions: passes × layers
    from_positions: float  # speed-up if time were proportional to layer-positions
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
    lack_of_fit: float | None  # p-value; small if configurations deviate from the model by more than their trials vary


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelledSpeedup:
    """A speed-up in tokens/s that the cost model predicts for these documents. It decides nothing."""

    tokens: Estimate
    lack_of_fit: float | None


def fit_cost_model(rows: TaskRuns) -> CostModel | None:
    """Weighted least squares, with errors proportional to the time.

    None with fewer than MIN_SPARE_TRIALS trials more than counters, or if a trial took no time.
    """
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
        coefficients, *_ = _least_squares(counters / predicted[:, None], work / predicted)
        predicted = np.maximum(counters @ coefficients, 0.1 * work)
    owners, group = np.unique(owner, return_inverse=True)
    shifts = (group.reshape(-1)[:, None] == np.arange(len(owners))).astype(float)  # a constant per configuration
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
    """The model's number of layers: as recorded, else the number that k=1 computed per pass (from its sums `base`)."""
    recorded = model.get("depth", model.get("num_layers"))
    if recorded:
        return int(recorded)
    return round(base["layers_computed"] / base["passes"]) if base and base["passes"] else None


def flops_per_token(positions_per_token: float | None, model: Mapping[str, Any]) -> float | None:
    """Two operations per weight of the layers that ran, without attention over the context and without the head.

    None if a number is unknown.
    """
    weights = _weights_per_layer(model)
    return None if weights is None or positions_per_token is None else 2 * weights * positions_per_token


def _weights_per_layer(model: Mapping[str, Any]) -> float | None:
    """Attention and MLP weights of a layer as recorded, else an equal share of all parameters."""
    if model.get("layer_weights"):
        return float(sum(model["layer_weights"]))
    depth, parameters = depth_of(model), model.get("parameters")
    return parameters / depth if depth and isinstance(parameters, int | float) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRatio:
    """Speed-up in tokens/s (documents/s if nothing is generated) on one shard."""

    started_at: float  # when the configuration's trial started, in seconds since 1970
    ratio: float


def shard_ratios(rows: TaskRuns, runs: Array, baseline: Array) -> tuple[ShardRatio, ...]:
    """A configuration against k=1 on each shard that both completed, in order of time.

    Of more than MAX_SHARD_RATIOS, that many are chosen at even distances.
    """
    cells = rows.timed[runs]
    base = [np.broadcast_to(rows.mean(baseline, name, timed=True), cells.shape) for name in ("tokens", "work")]
    both = (cells >= 0) & ~np.isnan(base[1])
    own = {name: rows.columns[name][cells[both]] for name in ("trial_id", "tokens", "work", "started_at")}
    trial, trials = group_codes(own["trial_id"])
    sums = [
        np.bincount(trial, weights=values, minlength=trials)
        for values in (own["tokens"], own["work"], *(side[both] for side in base))
    ]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = sums[3] / sums[1] * np.where(sums[2] > 0, sums[0] / sums[2], 1.0)
    started = np.full(trials, np.inf)
    np.minimum.at(started, trial, own["started_at"])
    order = np.argsort(started, kind="stable")
    order = order[ratio[order] > 0]
    chosen = order[np.unique(np.linspace(0, len(order) - 1, min(len(order), MAX_SHARD_RATIOS)).astype(int))]
    return tuple(ShardRatio(started_at=float(started[one]), ratio=float(ratio[one])) for one in chosen)


def family_order(family: str) -> tuple[int, str]:
    """Sort key for tables and legends; unknown families come last, by name."""
    return (FAMILIES.index(family), "") if family in FAMILIES else (len(FAMILIES), family)


def family_of(resolved: ResolvedConfiguration, reference: Configuration) -> str:
    """For k=1, the decode setting that differs from the reference; for other policies, their rule."""
    if resolved.k == 1:
        changed = [name.replace("_", " ") for name in resolved.configuration.changed_from(reference)]
        return REFERENCE if not changed else changed[0] if len(changed) == 1 else SEVERAL_SETTINGS
    if resolved.k is not None:
        return OUTPUT if resolved.mode == "output" else GRID
    rule = resolved.policy.partition("_")[0].partition("=")[0]
    return "trim, random" if rule == "trim" and resolved.policy.endswith(".random") else rule


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """Gains over k=1 at the first decode settings, per token and on the same documents: above 1 is better."""

    name: str  # the policy and its decode settings that differ from the reference
    family: str
    points: Estimate  # paired accuracy difference; negative is worse
    speed: Estimate | None
    executions: float | None  # a half layer counts as its share of the layer's weights
    positions: float | None
    beaten_by: tuple[str | None, ...] = (None,) * len(AXES)  # by axis: name of a configuration that dominates this one

    def gain(self, axis: str) -> float | None:
        speed = None if self.speed is None else self.speed.value
        return {SPEED: speed, EXECUTIONS: self.executions, POSITIONS: self.positions}[axis]

    def on_front(self, axis: str) -> bool:
        """Whether no other configuration dominates its accuracy and its gain on this axis."""
        return self.gain(axis) is not None and self.beaten_by[AXES.index(axis)] is None


def rank(
    rows: TaskRuns,
    number: int,
    reference: Configuration,
    speed: Estimate | None,
    model: Mapping[str, Any],
    rng: np.random.Generator,
) -> Ranking | None:
    """One configuration against k=1 at the settings of `reference`; None if they share no document."""
    resolved, runs, base = rows.configurations[number], rows.runs_of(number), rows.baseline_runs(reference.settings)
    both = rows.present(runs) & rows.present(base)
    if not both.any():
        return None

    def gain(work: Callable[[Array], Array]) -> float | None:
        """Work per token at k=1 ÷ work per token here."""
        sums = [(work(side)[both].sum(), rows.mean(side, "tokens")[both].sum()) for side in (base, runs)]
        (base_work, base_tokens), (own_work, own_tokens) = sums
        if not (base_tokens > 0 and own_tokens > 0 and own_work > 0):
            return None
        return float((base_work / base_tokens) / (own_work / own_tokens))

    if resolved.is_baseline and resolved.settings == reference.settings:
        points = Estimate(value=0.0, low=0.0, high=0.0)
    else:
        scores, base_scores = rows.mean(runs, "score")[both], rows.mean(base, "score")[both]
        points = paired_difference(base_scores, scores, rows.strata[both], rng=rng).points
    configuration = resolved.configuration
    return Ranking(
        name=configuration.label(configuration.changed_from(reference)),
        family=family_of(resolved, reference),
        points=points,
        speed=speed,
        executions=gain(lambda side: _executions(rows, side, resolved, model)),
        positions=gain(lambda side: rows.mean(side, "layer_positions")),
    )


def _executions(rows: TaskRuns, runs: Array, resolved: ResolvedConfiguration, model: Mapping[str, Any]) -> Array:
    """By document: layers that ran, less the share of a layer's weights for each half layer that was replayed."""
    weights = model.get("layer_weights") or (0, 0)
    halves = {"attn": weights[0], "mlp": weights[1]}
    share = halves.get(str(resolved.mode), 0) / max(1, sum(weights))
    replayed = rows.mean(runs, "replayed") * len(resolved.layers) * share
    result: Array = rows.mean(runs, "layers_computed") - replayed
    return result


def dominates(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether `one` is at least as good in both coordinates, and better in one of them."""
    return one[0] >= other[0] and one[1] >= other[1] and one != other


def with_beaten_by(accuracies: Sequence[float], rankings: Sequence[Ranking | None]) -> list[Ranking | None]:
    """The rankings with `beaten_by` filled in; k=1 at other decode settings is named before policies."""
    pairs = list(zip(accuracies, rankings, strict=True))
    ranked = sorted(((a, one) for a, one in pairs if one is not None), key=lambda pair: family_order(pair[1].family))
    return [
        None if one is None else replace(one, beaten_by=tuple(_beaten_by(accuracy, one, ranked, axis) for axis in AXES))
        for accuracy, one in pairs
    ]


def _beaten_by(accuracy: float, one: Ranking, ranked: Sequence[tuple[float, Ranking]], axis: str) -> str | None:
    own = one.gain(axis)
    for other_accuracy, other in ranked:
        gain = other.gain(axis)
        if own is not None and gain is not None and dominates((other_accuracy, gain), (accuracy, own)):
            return other.name
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class FastestOfFamily:
    """The fastest configuration of a family whose accuracy interval lies above minus the margin."""

    family: str
    tried: int
    index: int | None  # into the task's configurations; None: none is within the margin


def fastest_within_margin(
    rankings: Sequence[Ranking | None], margin: float, axis: str = SPEED
) -> list[FastestOfFamily]:
    """By family, in the order of `family_order`; `axis` says what counts as fast."""
    result = []
    for family in sorted({one.family for one in rankings if one is not None}, key=family_order):
        members = {index: one for index, one in enumerate(rankings) if one is not None and one.family == family}
        gains = {index: one.gain(axis) or 0.0 for index, one in members.items() if one.points.low > -margin}
        best = max(gains, key=gains.__getitem__) if gains else None
        result.append(FastestOfFamily(family=family, tried=len(members), index=best))
    return result


def beyond_fixed_grid(rankings: Sequence[Ranking | None]) -> bool:
    """Whether there is more than the fixed grid at one set of decode settings."""
    return any(one is not None and one.family not in (REFERENCE, GRID, OUTPUT) for one in rankings)
