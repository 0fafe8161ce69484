"""Says what keeps workers from starting: what each asks for, and what the cluster has left. Knows no trials."""

import ray

from orchestrator.planning.machine import Placement

KINDS = ("CPU", "GPU")


def asked_and_free(placement: Placement) -> str:
    """each asks for 1 CPU and 0.5 GPU, and the cluster has 0 of 4 CPU and 2 of 2 GPU free"""
    asked = {"CPU": placement.cpus_per_actor, "GPU": placement.gpus_per_actor}
    kinds = [kind for kind in KINDS if asked[kind]]
    free, there = ray.available_resources(), ray.cluster_resources()
    wanted = " and ".join(f"{asked[kind]:g} {kind}" for kind in kinds)
    left = " and ".join(f"{free.get(kind, 0):g} of {there.get(kind, 0):g} {kind}" for kind in kinds)
    return f"each asks for {wanted}, and the cluster has {left} free"
