"""How fast an actor was at the moment of each row: by the calibrations before it and those after it. Knows no policies.

A row's calibration is the mean of the last samples its actor had taken. One sample is short: a hiccup of the machine
that a trial would hardly feel doubles it, and stays in four calibrations. A small machine changes its speed within
seconds, too, and the samples that follow say as much of the moment as those before. So a moment's speed is the median
of the calibrations around it.
"""

import numpy as np
import pyarrow as pa

from orchestrator.analysis.columns import Array, codes, grouped, numbers

SAMPLES = 4  # that a calibration is the mean of
REACH = 6  # calibrations on either side of those that hold the samples next to the row: more than a hiccup spoils
AT_ONCE = 50_000  # medians; each needs a row of neighbours


def speeds_of_moments(rows: pa.Table) -> Array:
    """Tokens/s for each row, from the calibrations of its own actor."""
    own = numbers(rows["calibration"]).astype(np.float64)
    actor, _ = grouped(*(codes(rows[name])[0] for name in ("sweep", "actor", "device")))
    order = np.lexsort((rows["started_at"].cast(pa.int64()).to_numpy(), actor))
    speed, first = own[order], np.diff(actor[order], prepend=-1) != 0
    taken = first | (np.diff(speed, prepend=np.nan) != 0)  # a calibration that changed has one sample more
    result = np.empty(len(own))
    result[order] = _medians(speed[taken], first[taken])[np.cumsum(taken) - 1]
    return result


def _medians(values: Array, first: Array) -> Array:
    """Around each place, within its own actor; where that has no more calibrations, those within reach count twice."""
    begins = np.flatnonzero(first)
    actor = np.cumsum(first) - 1
    low, high = begins[actor], np.append(begins[1:], len(values))[actor] - 1
    around = np.arange(-REACH, SAMPLES + REACH + 1)
    result = np.empty(len(values))
    for start in range(0, len(values), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        lowest, highest = low[part, None], high[part, None]
        place = np.arange(len(values))[part, None] + around
        place = np.where(place < lowest, 2 * lowest - place, place)
        place = np.where(place > highest, 2 * highest - place, place)
        result[part] = np.median(values[np.clip(place, lowest, highest)], axis=1)
    return result
