"""How far a plan is, from what its folder holds. Only reads; knows no Ray."""

import pyarrow as pa
import pyarrow.compute as pc

from orchestrator.plan import Plan
from orchestrator.progress import Progress
from orchestrator.store import Store
from orchestrator.tally import COLUMNS, Tally, sums_of


def stored_tally(plan: Plan, store: Store) -> Tally:
    """Totals of the planned documents: an earlier command may have asked for more of them."""
    tally = Tally(plan.rows_wanted())
    there = set(store.trial_ids())
    for trial in plan.trials:
        if trial.trial_id in there:
            rows = store.rows([trial.trial_id], ["doc_id", *COLUMNS], verify=False)
            for configuration, sums in sums_of(rows.filter(pc.is_in(rows["doc_id"], pa.array(plan.wanted(trial))))):
                tally.add_sums(configuration, sums)
    return tally


def stored_progress(plan: Plan, store: Store) -> Progress:
    facts = store.trials()
    planned = {trial.trial_id for trial in plan.trials}
    return Progress(
        sweep=plan.sweep,
        totals=stored_tally(plan, store).totals(),
        trials=len(plan.trials),
        finished=len(plan.trials) - len(plan.unfinished(facts)),
        failed=sum(facts[trial_id]["status"] == "failed" for trial_id in planned & facts.keys()),
    )
