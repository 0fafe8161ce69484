"""What a maker of a small mathematical problem hands over."""

import random
from collections.abc import Callable

Part = tuple[str, int, str, int, str]  # what is computed, left, sign, right, what is then known ({}: the result)
Draw = tuple[str, tuple[int, ...], str, list[Part]]  # template, its numbers, problem, the parts of its solution
Maker = Callable[[random.Random], Draw]
