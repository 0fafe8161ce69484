"""python -m sampler.bench: what a pass costs, against the bare matrix products it cannot do without."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from sampler.cli import Parser, add_device_flags, run_command
from sampler.errors import InputError
from sampler.loading import load_model, pick_device, pick_dtype
from sampler.measure import Bench
from sampler.plan import PassKind
from sampler.policy import ReusePolicy
from sampler.random_model import SHAPES, random_model

POLICIES = [
    *(f"k{k}_{subset}{mode}" for mode in ("", ".output") for k in (2, 3) for subset in ("first", "middle", "last")),
    *(f"{rule}_middle" for rule in ("adaptive=0.2", "trim=0.1", "trim=0.25", "mlp=2", "attn=2", "skip")),
    "stale=2",
]
EXAMPLES = """examples:
  python -m sampler.bench                                   the small built-in shape, one thread
  python -m sampler.bench --shape mid --batch 1,8 --json
  python -m sampler.bench --shape mid --batch 8 --policies trim=0.1_all,mlp=2_middle
  python -m sampler.bench --shape Efficient-Large-Model/Fast_dLLM_v2_7B --batch 1,4,8
"""


def measure(bench: Bench, batches: Sequence[int], policies: Sequence[str] = POLICIES) -> dict[str, Any]:
    """Everything the command prints, as plain values."""
    kinds = (PassKind.FULL, PassKind.SMALL)
    passes = {batch: {kind.value: bench.pass_times(kind, batch) for kind in kinds} for batch in batches}
    speeds = {batch: bench.decode(2 * batch, batch)[0] for batch in batches}
    return {
        "passes": {
            str(batch): {kind: {**asdict(t), "ratio": t.computed / t.floor} for kind, t in times.items()}
            for batch, times in passes.items()
        },
        "tokens_per_s": {str(batch): speed for batch, speed in speeds.items()},
        "policies": _policies(bench, policies, batches[0]),
        "prefill_tokens_per_s": bench.prefill_tokens_per_second(),
        "scoring": bench.scoring(),
    }


def _policies(bench: Bench, policies: Sequence[str], batch: int) -> dict[str, dict[str, float]]:
    """Each policy's replaying passes against their ideal, and its decoding against k1's right before it.

    The ideal is the share of layer-positions that run; deciding, for all rows, is a share of a computed full pass.
    """
    depth = bench.config.num_layers
    kinds = (PassKind.FULL, PassKind.SMALL)
    figures = {}
    replays: dict[object, dict[str, float]] = {}  # policies of different period replay alike
    for policy in policies:
        bound = ReusePolicy.parse(policy).bind(depth)
        shares = {kind: bench.share(policy, kind) for kind in kinds}
        alike = (*(bound.plan(bench.context(kind)) for kind in kinds), bound.keeps, batch)
        if alike not in replays:
            times = {kind: bench.pass_times(kind, batch, policy) for kind in kinds}
            replays[alike] = {
                **{f"{kind.value}_pass_to_ideal": t.reuse_ratio(shares[kind]) for kind, t in times.items()},
                **{f"{kind.value}_pass_to_computed": t.replayed / t.computed for kind, t in times.items()},
                "computed_ms": times[PassKind.FULL].computed,
            }
        base_speed, base_work = bench.decode(batch, batch)
        speed, work = bench.decode(batch, batch, policy=policy)
        figures[policy] = {
            "share": shares[PassKind.FULL],
            "small_share": shares[PassKind.SMALL],
            "deciding": bench.deciding(policy) * batch / replays[alike]["computed_ms"],
            **replays[alike],
            "tokens_per_s": speed,
            "time_to_k1": base_speed / speed,
            "layer_positions_to_k1": work.layer_positions / base_work.layer_positions,
        }
    return figures


def table(figures: dict[str, Any]) -> str:
    """The figures for people, in 80 columns."""
    lines = [figures["where"], "", "batch  pass       ms   floor  x floor   tokens/s   per row vs batch 1"]
    first = next(iter(figures["passes"].values()))
    for batch, kinds in figures["passes"].items():
        for kind, t in kinds.items():
            speed = f"{figures['tokens_per_s'][batch]:10.1f}" if kind == "full" else " " * 10
            gain = first[kind]["computed"] / t["computed"] * int(batch) / int(next(iter(figures["passes"])))
            lines.append(
                f"{batch:>5}  {kind:5} {t['computed']:7.2f} {t['floor']:7.2f} {t['ratio']:8.2f} {speed} {gain:12.2f}"
            )
    lines += ["", "policy                   work replaying pass:     of its ideal   tokens/s  time layer-pos. deciding"]
    lines += ["                         run  of a computed       full   small            (against k1)  (of a pass)"]
    for name, p in figures["policies"].items():
        lines.append(
            f"{name:24} {p['share']:4.0%} {p['full_pass_to_computed']:13.2f} {p['full_pass_to_ideal']:10.2f} "
            f"{p['small_pass_to_ideal']:7.2f} {p['tokens_per_s']:10.1f} {p['time_to_k1']:5.2f} "
            f"{p['layer_positions_to_k1']:8.2f} {p['deciding']:10.2%}"
        )
    scoring = figures["scoring"]
    lines += [
        "",
        f"prefill {figures['prefill_tokens_per_s']:.0f} tokens/s; scoring {scoring['questions']} four-option questions "
        "behind one 400-token prefix:",
        f"shared/apart {scoring['token_forwards_ratio']:.3f} of the token-forwards, {scoring['seconds_ratio']:.3f} of "
        f"the time, scores differ by at most {scoring['largest_difference']:.1e}",
    ]
    return "\n".join(lines)


def main() -> None:
    arguments = _parser().parse_args()
    batches = _batches(arguments.batch)
    for name in ("threads", "rounds"):
        if getattr(arguments, name) < 1:
            raise InputError(f"{name} {getattr(arguments, name)}: at least 1 is allowed")
    policies = [str(ReusePolicy.parse(name)) for name in arguments.policies.split(",")]
    torch.set_num_threads(arguments.threads)
    device = pick_device(arguments.device)
    dtype = pick_dtype(arguments.dtype, device)
    if arguments.shape in SHAPES:
        model = random_model(SHAPES[arguments.shape], dtype=dtype, device=device)
    else:
        model = load_model(arguments.shape, dtype=arguments.dtype, device=arguments.device)
    small = arguments.shape == "tiny"
    bench = Bench(
        model,
        rounds=arguments.rounds,
        new_tokens=96 if small else 40,
        questions=200 if small else 10,
    )
    dtype_name = str(model.dtype).removeprefix("torch.")
    where = f"{arguments.shape}: {dtype_name} on {device}, {arguments.threads} thread(s), torch {torch.__version__}"
    figures = {"where": where, **measure(bench, batches, policies)}
    print(json.dumps(figures, indent=1) if arguments.json else table(figures))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m sampler.bench",
        description="Measures passes, policies, batches, prefill and scoring of a random or a real model.",
        examples=EXAMPLES,
    )
    parser.add_argument("--shape", default="tiny", help="tiny, mid, or a model: a folder or a Hub id (default: tiny)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--batch", default="1,4,8", help="batch sizes (default: 1,4,8)")
    parser.add_argument("--policies", default=",".join(POLICIES), help="measured at the first batch size")
    parser.add_argument("--rounds", type=int, default=20, help="measurements per median (default: 20)")
    add_device_flags(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _batches(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise InputError(f"batch {text!r}: positive whole numbers separated by commas are allowed, as in 1,4,8")
    return [int(part) for part in parts]


if __name__ == "__main__":
    run_command(main)
