"""Refuses what the sweep itself would refuse, before anybody waits in a queue to hear it. Asks no Hub.

Nodes of a job may reach what a login node does not; so a model or documents of the Hub are believed to be there.
"""

import os
import re

from orchestrator.planning.machine import Machine, resolve_model
from orchestrator.planning.preflight import prepare
from orchestrator.planning.problems import Problems
from orchestrator.planning.request import Request, adopt
from orchestrator.planning.settings import SweepSettings
from sampler.loading import find_model
from sampler.tiny import BUNDLED_MODEL
from tasks.opening import find_entry
from tasks.sources import choose_source, resolve_auto

HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?(@.+)?")


def foresee(settings: SweepSettings, machine: Machine, stored: Request | None) -> None:
    """An InputError with all that is known to be wrong; `stored` is the folder's sweep.json."""
    adopted = adopt(settings, stored)
    model = os.path.expanduser(resolve_model(adopted.model, machine, adopted.address))
    data = os.path.expanduser(resolve_auto(adopted.data, model))
    if _is_here(model) and data != "hub":
        prepare(settings, machine, stored)
        return
    problems = Problems()
    if _is_here(model):
        with problems.noted():
            find_model(model, weights=False)
    with problems.noted():
        choose_source(data)
    for name in () if settings.skip_unavailable else settings.tasks:
        with problems.noted():
            find_entry(name)
    problems.check()


def _is_here(model: str) -> bool:
    """Or nowhere: what is no id of the Hub's can only be a folder."""
    return model == BUNDLED_MODEL or os.path.exists(model) or HUB_ID.fullmatch(model) is None
