"""How far a plan is, from what its folder holds. Only reads; knows no Ray."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from orchestrator.planning.grid import TrialSpec
from orchestrator.planning.plan import Plan, configuration_of
from orchestrator.store import Store
from orchestrator.watching.progress import Progress
from orchestrator.watching.tally import COLUMNS, Sums, Tally, trial_sums

Facts = Mapping[str, Mapping[str, Any]]  # each trial.json, by trial


def stored_tally(plan: Plan, store: Store, facts: Facts | None = None) -> Tally:
    """Totals of the planned documents. A finished trial is summed up in its trial.json; of others rows are read."""
    facts = store.trials() if facts is None else facts
    tally = Tally(plan.rows_wanted())
    for trial in plan.trials:
        known = facts.get(trial.trial_id)
        if known is not None:
            tally.add_sums(configuration_of(trial), _sums(plan, trial, known, store))
    return tally


def _sums(plan: Plan, trial: TrialSpec, known: Mapping[str, Any], store: Store) -> Sums:
    wanted, summed = plan.wanted(trial), known.get("tally")
    if known["status"] == "finished" and summed is not None and summed["documents"] == len(wanted):
        return Sums.from_json(summed)
    rows = store.rows([trial.trial_id], ["doc_id", *COLUMNS], verify=False)
    return trial_sums(rows.filter(pc.is_in(rows["doc_id"], pa.array(wanted, pa.string()))))


def stored_progress(plan: Plan, store: Store) -> Progress:
    facts = store.trials()
    planned = {trial.trial_id for trial in plan.trials}
    return Progress(
        sweep=plan.sweep,
        totals=stored_tally(plan, store, facts).totals(),
        trials=len(plan.trials),
        finished=len(plan.trials) - len(plan.unfinished(facts)),
        failed=sum(facts[trial_id]["status"] == "failed" for trial_id in planned & facts.keys()),
    )
