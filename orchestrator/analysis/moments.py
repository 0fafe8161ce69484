"""How fast an actor was at the moment of each row: by the samples before it and those after it. Knows no policies.

A row's calibration is the mean of the last samples its actor had taken. A small machine changes its speed within
seconds, and the samples that follow say as much of the moment as those before; rows that came later have them.
"""

import numpy as np
import pyarrow as pa

from orchestrator.analysis.columns import Array, codes, grouped, numbers

SAMPLES = 4  # that a calibration is the mean of


def speeds_of_moments(rows: pa.Table) -> Array:
    """Tokens/s, for each row the mean of its calibration and of the one its actor had `SAMPLES` samples later."""
    own = numbers(rows["calibration"]).astype(np.float64)
    actor, _ = grouped(*(codes(rows[name])[0] for name in ("sweep", "actor", "device")))
    order = np.lexsort((rows["started_at"].cast(pa.int64()).to_numpy(), actor))
    speed, first = own[order], np.diff(actor[order], prepend=-1) != 0
    taken = first | (np.diff(speed, prepend=np.nan) != 0)  # a calibration that changed has one sample more
    sample = np.cumsum(taken) - 1
    last = sample[np.append(np.flatnonzero(first)[1:], len(sample)) - 1][np.cumsum(first) - 1]
    later = speed[taken][np.minimum(sample + SAMPLES, last)]
    result = np.empty(len(own))
    with np.errstate(divide="ignore"):
        result[order] = 2 / (1 / speed + 1 / later)
    return result
