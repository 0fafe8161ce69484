"""Checks a sweep before it is submitted: everything the sweep would refuse, except what needs the Hub.

Compute nodes may reach what a login node cannot, and the reverse; models and documents on the Hub are assumed to exist.
"""

import os
import re

from orchestrator.core.errors import Problems
from orchestrator.planning.machine import Machine, resolve_model
from orchestrator.planning.preflight import prepare
from orchestrator.planning.request import Request, adopt
from orchestrator.planning.settings import SweepSettings
from sampler.loading import find_model
from sampler.tiny import BUNDLED_MODEL
from tasks.lookup import find_entry
from tasks.sources import choose_source, resolve_auto

HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?(@.+)?")


def check_sweep(settings: SweepSettings, machine: Machine, stored: Request | None) -> None:
    """Raises an InputError with every problem found. `stored` is the sweep.json of the directory, if there is one."""
    adopted = adopt(settings, stored)
    model = os.path.expanduser(resolve_model(adopted.model, machine, adopted.address))
    data = os.path.expanduser(resolve_auto(adopted.data, model))
    if _is_local(model) and data != "hub":
        prepare(settings, machine, stored)
        return
    problems = Problems()
    if _is_local(model):
        with problems.collect():
            find_model(model, weights=False)
    with problems.collect():
        choose_source(data)
    for name in () if settings.skip_unavailable else settings.tasks:
        with problems.collect():
            find_entry(name)
    problems.check()


def _is_local(model: str) -> bool:
    """Whether the model is a directory here, or cannot be a Hub id and so would have to be one."""
    return model == BUNDLED_MODEL or os.path.exists(model) or HUB_ID.fullmatch(model) is None
