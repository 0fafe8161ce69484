"""Why a speed-up is what it is: what the policy could save at best, what it saved, and where the rest went.

A document's time is its passes × the time of a pass, and a pass is the layers it computes and what is no layer:
embedding, head, choosing tokens, starting kernels. Each factor's ratio against k=1 multiplies to the measured speed-up;
the last one holds what no count accounts for, so nothing is left over. Knows no clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestrator.analysis.columns import Array
from orchestrator.analysis.runs import Configuration, TaskRows


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Ratios against k=1, above 1 is a gain. passes × layers × outside × rest = measured."""

    ideal: float | None  # the named layers left out on every denoising pass but each k-th, nothing else changed
    measured: float  # of tokens/s, calibrated
    passes: float  # passes per token: below 1 means more of them
    layers: float  # layers computed per pass
    outside: float | None  # what the part of a pass that is no layer takes off the gain in layers; None: not to be told
    rest: float  # measured, beyond what the counts above explain
    from_executions: float  # what layer executions alone would give: passes × layers
    from_positions: float  # what layer-positions alone would give
    replayed_share: float  # of the denoising passes
    denoising_share: float  # full and small passes among all of them; only these can replay
    outside_layers: float | None  # part of a pass at k=1 that is no layer, fitted over this table; None: not to be told
    sentence: str


def ideal(configuration: Configuration, depth: int | None) -> float | None:
    """1 / (1 − (k−1)/k · layers/depth): 1.20 for 12 of 36 layers at k=2. Output mode leaves out every layer."""
    if configuration.k is None or configuration.k < 2 or not depth:
        return None
    layers = depth if configuration.mode == "output" else len(configuration.layers)
    left = 1 - (configuration.k - 1) / configuration.k * layers / depth
    return 1 / left if left > 0 else None


def explain(
    rows: TaskRows,
    runs: Array,
    against: Array,
    number: int,
    measured: float,
    model: Mapping[str, Any],
    outside: float | None,
) -> Explanation | None:
    """None where the two sides share no document, or one delivered no token."""
    both = rows.present(runs) & rows.present(against)
    ours, base = _totals(rows, runs, both), _totals(rows, against, both)
    if not all(side[name] > 0 for side in (ours, base) for name in ("tokens", "passes", "layers_computed")):
        return None
    per_token = {
        name: (base[name] / base["tokens"]) / (ours[name] / ours["tokens"])
        for name in ("passes", "layer_positions", "layers_computed")
    }
    configuration = rows.configurations[number]
    best = ideal(configuration, depth_of(model, base))
    executions = per_token["layers_computed"]
    layers = executions / per_token["passes"]
    kept = None if outside is None else 1 / (1 - outside + outside * layers)
    result = {
        "ideal": best,
        "measured": measured,
        "passes": per_token["passes"],
        "layers": layers,
        "outside": kept,
        "rest": measured / executions / (1.0 if kept is None else kept),
        "from_executions": executions,
        "from_positions": per_token["layer_positions"],
        "replayed_share": ours["replayed"] / max(1.0, ours["steps"]),
        "denoising_share": ours["steps"] / ours["passes"],
    }
    return Explanation(
        **result,  # type: ignore[arg-type]
        outside_layers=outside,
        sentence=_sentence(configuration.label, result, outside),
    )


def _totals(rows: TaskRows, runs: Array, documents: Array) -> dict[str, float]:
    names = ("tokens", "passes", "layers_computed", "layers_reused", "layer_positions", "replayed", "steps")
    return {name: float(rows.mean(runs, name)[documents].sum()) for name in names}


def depth_of(model: Mapping[str, Any], base: Mapping[str, float] | None = None) -> int | None:
    """The model's layers: as stated, else as k=1 ran them in each pass."""
    stated = model.get("depth", model.get("num_layers"))
    if stated:
        return int(stated)
    return round(base["layers_computed"] / base["passes"]) if base and base["passes"] else None


def outside_layers(rows: TaskRows, depth: int | None) -> float | None:
    """The part of a computed pass that no layer accounts for: time fitted as a · layers + b · passes, all documents."""
    taken = rows.rows_of(list(rows.all_runs))
    layers, passes = (rows.columns[name][taken].astype(float) for name in ("layers_computed", "passes"))
    work = rows.columns["work"][taken]
    if not depth or len(taken) < 3 or not (rows.columns["layers_reused"][taken] > 0).any():
        return None
    normal = np.array([[layers @ layers, layers @ passes], [layers @ passes, passes @ passes]])
    if np.linalg.cond(normal / normal.max()) > 1e8:
        return None
    layer, single = np.linalg.solve(normal, np.array([layers @ work, passes @ work]))
    whole = depth * layer + single
    return float(min(1.0, max(0.0, single / whole))) if whole > 0 else None


def flops_per_token(positions_per_token: float | None, model: Mapping[str, Any]) -> float | None:
    """Two operations per weight of the layers run; attention over the context and the head are left out."""
    weights = layer_weights(model)
    return None if weights is None or positions_per_token is None else 2 * weights * positions_per_token


def layer_weights(model: Mapping[str, Any]) -> float | None:
    """Weights of one layer: of attention and MLP as the request states them, else an even share of all there are."""
    if model.get("layer_weights"):
        return float(sum(model["layer_weights"]))
    depth, parameters = depth_of(model), model.get("parameters")
    return parameters / depth if depth and isinstance(parameters, int | float) else None


def _sentence(label: str, found: Mapping[str, float | None], outside: float | None) -> str:
    best = found["ideal"]
    value = {name: float(number) for name, number in found.items() if number is not None}
    start = f"{label} runs at {value['measured']:.2f}× the speed of k=1"
    start += f" where {best:.2f}× would be ideal" if best is not None else ""
    parts = [
        f"it computed {_change(1 / value['layers'], 'fewer', 'as many')} layers per pass ("
        f"{value['replayed_share']:.0%} of its denoising passes replayed some; prefill and commit passes, "
        f"{1 - value['denoising_share']:.0%} of all, never do)",
        f"it took {_change(1 / value['passes'], 'fewer', 'as many')} passes per token",
    ]
    if outside is not None:
        parts.append(
            f"what is no layer, {outside:.0%} of a pass at k=1, stayed and left ×{value['outside']:.2f} of that"
        )
    parts.append(f"what no count explains is ×{value['rest']:.2f}")
    return f"{start}: {'; '.join(parts)}."


def _change(ratio: float, less: str, same: str) -> str:
    return same if abs(ratio - 1) < 0.005 else f"{abs(ratio - 1):.0%} {'more' if ratio > 1 else less}"
