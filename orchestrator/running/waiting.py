"""Says what keeps workers from starting: what each asks for, and what the cluster has left. Knows no Ray."""

from collections.abc import Mapping

from orchestrator.planning.machine import Placement

Resources = Mapping[str, float]  # as Ray counts them


def asked_and_free(placement: Placement, *, free: Resources, there: Resources) -> str:
    """each asks for 1 CPU and 0.5 GPU, and the cluster has 0 of 4 CPU and 2 of 2 GPU free"""
    asked = {"CPU": placement.cpus_per_actor, "GPU": placement.gpus_per_actor}
    kinds = [kind for kind, amount in asked.items() if amount]
    wanted = " and ".join(f"{asked[kind]:g} {kind}" for kind in kinds)
    left = " and ".join(f"{free.get(kind, 0):g} of {there.get(kind, 0):g} {kind}" for kind in kinds)
    return f"each asks for {wanted}, and the cluster has {left} free"
