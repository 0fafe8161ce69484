"""Small problems of minerva_math's seven subjects, in the shape of its documents. Knows not the split."""

import random
from dataclasses import dataclass

from tools.documents.arithmetic import Sum, small
from tools.documents.math_letters import LETTERS
from tools.documents.math_parts import Maker
from tools.documents.math_plain import PLAIN
from tools.documents.split import Key
from tools.documents.wording import Line, fits, solution

LEVELS = 5
SUBJECTS: dict[str, tuple[Maker, ...]] = dict(sorted((PLAIN | LETTERS).items()))


@dataclass(frozen=True, kw_only=True, slots=True)
class MathProblem:
    key: Key
    subject: str
    problem: str
    level: int
    solution: str

    def document(self) -> dict[str, str]:
        kind = self.subject.replace("_", " ").title().replace(" And ", " & ")
        return {"problem": self.problem, "level": f"Level {self.level}", "type": kind, "solution": self.solution}

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.problem,)

    @property
    def target(self) -> str:
        return self.solution


def draw_math_problem(subject: str, source: random.Random) -> MathProblem:
    """Draws until all the sums are among those that are taught and the solution is neither short nor long."""
    maker = source.choice(SUBJECTS[subject])
    while True:
        template, numbers, problem, parts = maker(source)
        if any(not small(left, sign, right) for _, left, sign, right, _ in parts):
            continue
        lines = [Line(why=why, sum=Sum(left, sign, right), so=so) for why, left, sign, right, so in parts]
        solved = f"{solution(lines, source)} The answer is $\\boxed{{{lines[-1].sum.result}}}$."
        if fits(solved):
            key: Key = ("minerva_math", template, *numbers)
            return MathProblem(key=key, subject=subject, problem=problem, level=_level(lines), solution=solved)


def _level(lines: list[Line]) -> int:
    """More steps and larger numbers are harder."""
    large = max(max(line.sum.left, line.sum.result) for line in lines)
    return min(LEVELS, len(lines) - 1 + (large > 20) + (large > 40))
