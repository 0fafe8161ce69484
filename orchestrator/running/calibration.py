"""An actor's speed of the moment: fixed documents, before each trial and now and then within it. Knows no model.

The moment before a trial is a bad one to be the only one: on a small machine the end of the trial before is still
being stored, and a shared one changes its speed within seconds. So samples are also taken while a trial runs, rarely
enough to cost a thirteenth of its time, and a row has the speed of its own moment. A GPU keeps its speed for longer and
its hours are dear: there a minute passes between two.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
PARTS = 4  # of the fixed documents; a sample decodes one, the next sample the next
REST = 12  # times as long as the last sample took, at least, before the next one within a trial


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The speed of the moment, and what finding it took just now."""

    speed: float  # tokens/s
    seconds: float


class Calibrator:
    """`decode` decodes one part of the fixed documents and says how many tokens that gave.

    Within a trial samples are at least `apart` seconds from one another.
    """

    def __init__(
        self, decode: Callable[[int], int], *, apart: float = 0.0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._decode, self._apart, self._clock = decode, apart, clock
        self._samples: deque[tuple[int, float]] = deque(maxlen=PARTS)  # tokens and seconds
        self._taken = 0
        self._ended = 0.0
        self.within = 0.0  # seconds that samples took in the trial that runs, or ran last

    def before_trial(self) -> Calibration:
        """One more sample; the first time one of each part."""
        began = self._clock()
        self._sample()
        while len(self._samples) < PARTS:
            self._sample()
        self.within = 0.0
        return Calibration(speed=self.speed, seconds=self._clock() - began)

    @property
    def speed(self) -> float:
        """Tokens/s of the last samples, in which each part counts once; none were taken yet: not a number."""
        if not self._samples:
            return math.nan
        return sum(tokens for tokens, _ in self._samples) / sum(seconds for _, seconds in self._samples)

    def during(self, results: Iterable[T]) -> Iterator[T]:
        """Hands the results of a trial on, with samples in between."""
        for result in results:
            yield result
            if self._samples and self._clock() - self._ended > max(self._apart, REST * self._samples[-1][1]):
                self._sample()
                self.within += self._samples[-1][1]

    def _sample(self) -> None:
        began = self._clock()
        tokens = self._decode(self._taken % PARTS)
        self._ended = self._clock()
        self._samples.append((tokens, self._ended - began))
        self._taken += 1
