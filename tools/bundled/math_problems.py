"""Small problems of minerva_math's seven subjects, in the format of its documents.

Each template function draws one problem without checking its calculations; `draw_math_problem` draws until they are
small.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.bundled.problems import Calculation, Key, Step, has_allowed_length, is_small, write_steps

Part = tuple[str, int, str, int, str]  # name of the step, left, sign, right, conclusion with {} for the result
Draw = tuple[str, tuple[int, ...], str, list[Part]]  # template, its numbers, problem, parts of the solution
Template = Callable[[random.Random], Draw]

LEVELS = 5
PATTERNS = ("{lead} {name} is ${sum}$.", "{lead} ${sum}$, so {conclusion}.", "{lead} we find {name}: ${sum}$.")


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


def draw_math_problem(subject: str, rng: random.Random) -> MathProblem:
    """Draws until all calculations are small and the solution has an allowed length."""
    draw = rng.choice(SUBJECTS[subject])
    while True:
        template, numbers, problem, parts = draw(rng)
        if any(not is_small(left, sign, right) for _, left, sign, right, _ in parts):
            continue
        steps = [
            Step(name=name, calculation=Calculation(left, sign, right), conclusion=conclusion)
            for name, left, sign, right, conclusion in parts
        ]
        solution = f"{write_steps(steps, PATTERNS, rng)} The answer is $\\boxed{{{steps[-1].calculation.result}}}$."
        if has_allowed_length(solution):
            key: Key = ("minerva_math", template, *numbers)
            return MathProblem(key=key, subject=subject, problem=problem, level=_level(steps), solution=solution)


def _level(steps: list[Step]) -> int:
    """Problems with more steps and larger numbers are harder."""
    large = max(max(step.calculation.left, step.calculation.result) for step in steps)
    return min(LEVELS, len(steps) - 1 + (large > 20) + (large > 40))


def _outfits(rng: random.Random) -> Draw:
    a, b, c = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 15)
    parts = [
        ("the number of pairs", a, "*", b, "there are {} pairs"),
        ("the number of ways", a * b, "+", c, "there are {} ways"),
    ]
    problem = f"A child wears one of {a} coats with one of {b} hats, or one of {c} suits. How many ways are there?"
    return "outfits", (a, b, c), problem, parts


def _three_choices(rng: random.Random) -> Draw:
    a, b, c = rng.randint(2, 6), rng.randint(2, 5), rng.randint(2, 6)
    parts = [
        ("the number of pairs", a, "*", b, "there are {} pairs"),
        ("the number of ways", a * b, "*", c, "there are {} ways"),
    ]
    problem = f"How many ways are there to choose one of {a} coats, one of {b} hats and one of {c} suits?"
    return "three choices", (a, b, c), problem, parts


def _games(rng: random.Random) -> Draw:
    n, k = rng.randint(3, 8), rng.randint(1, 20)
    parts = [
        ("twice the number of games", n, "*", n - 1, "twice the number of games is {}"),
        ("the number of games", n * (n - 1), "/", 2, "there are {} games"),
        ("the number in all", n * (n - 1) // 2, "+", k, "there are {} in all"),
    ]
    problem = (
        f"Each of {n} teams plays one game with each of the {n - 1} others. Then there are {k} more games. "
        "How many games are there in all?"
    )
    return "games", (n, k), problem, parts


def _perimeter(rng: random.Random) -> Draw:
    a, b = rng.randint(2, 20), rng.randint(2, 12)
    parts = [
        ("half the perimeter", a, "+", b, "half the perimeter is {}"),
        ("the perimeter", 2, "*", a + b, "the perimeter is {}"),
    ]
    return "perimeter", (a, b), f"A rectangle has sides ${a}$ and ${b}$. Find its perimeter.", parts


def _side(rng: random.Random) -> Draw:
    a, b, c = rng.randint(2, 15), rng.randint(2, 15), rng.randint(2, 20)
    p = a + b + c
    parts = [
        ("the sum of two sides", a, "+", b, "the two sides make {}"),
        ("the third side", p, "-", a + b, "the third side is {}"),
    ]
    problem = f"A triangle has perimeter ${p}$. Two of its sides are ${a}$ and ${b}$. Find the third side."
    return "third side", (a, b, p), problem, parts


def _hole(rng: random.Random) -> Draw:
    a, b, s = rng.randint(3, 12), rng.randint(3, 9), rng.randint(2, 4)
    parts = [
        ("the area of the rectangle", a, "*", b, "the rectangle has area {}"),
        ("the area of the square", s, "*", s, "the square has area {}"),
        ("the area left", a * b, "-", s * s, "the area left is {}"),
    ]
    problem = f"A square of side ${s}$ is cut from a rectangle with sides ${a}$ and ${b}$. Find the area left."
    return "hole", (s, a, b), problem, parts


def _from_area(rng: random.Random) -> Draw:
    a, b = rng.randint(2, 9), rng.randint(2, 12)
    parts = [
        ("the other side", a * b, "/", a, "the other side is {}"),
        ("half the perimeter", a, "+", b, "half the perimeter is {}"),
        ("the perimeter", 2, "*", a + b, "the perimeter is {}"),
    ]
    return "from area", (a, b), f"A rectangle has area ${a * b}$ and one side ${a}$. Find its perimeter.", parts


def _division(rng: random.Random) -> Draw:
    d, q, k = rng.randint(3, 9), rng.randint(2, 12), rng.randint(1, 15)
    r = rng.randint(1, d - 1)
    parts = [
        ("the product", d, "*", q, "the product is {}"),
        ("the number", d * q, "+", r, "the number is {}"),
        ("the sum", d * q + r, "+", k, "the sum is {}"),
    ]
    problem = f"Divided by ${d}$ a number is ${q}$ with remainder ${r}$. Add ${k}$ to the number."
    return "division", (d, q, r, k), problem, parts


def _base(rng: random.Random) -> Draw:
    base = rng.randint(3, 9)
    a, b = rng.randint(1, base - 1), rng.randint(1, base - 1)
    parts = [
        ("the first part", a, "*", base, "the first part is {}"),
        ("the number", a * base, "+", b, "the number is {}"),
    ]
    return "base", (base, a, b), f"In base ${base}$ a number has the digits ${a}$ and ${b}$. Find the number.", parts


def _next_multiple(rng: random.Random) -> Draw:
    d, q, k = rng.randint(2, 9), rng.randint(2, 10), rng.randint(1, 15)
    parts = [
        ("the next multiple", d * q, "+", d, "the next multiple is {}"),
        ("the sum", d * q + d, "+", k, "the sum is {}"),
    ]
    return "next multiple", (d, q, k), f"Add ${k}$ to the first multiple of ${d}$ after ${d * q}$.", parts


def _order(rng: random.Random) -> Draw:
    a, b, c, d = rng.randint(1, 20), rng.randint(2, 9), rng.randint(2, 9), rng.randint(1, 15)
    parts = [
        ("the product", b, "*", c, "the product is {}"),
        ("the sum", a, "+", b * c, "the sum is {}"),
        ("the value", a + b * c, "-", d, "the value is {}"),
    ]
    return "order", (a, b, c, d), f"What is ${a}+{b}*{c}-{d}$?", parts


def _brackets(rng: random.Random) -> Draw:
    a, b, c, d = rng.randint(1, 9), rng.randint(1, 9), rng.randint(2, 6), rng.randint(1, 15)
    parts = [
        ("the sum", a, "+", b, "the sum is {}"),
        ("the product", a + b, "*", c, "the product is {}"),
        ("the value", (a + b) * c, "-", d, "the value is {}"),
    ]
    return "brackets", (a, b, c, d), f"What is $({a}+{b})*{c}-{d}$?", parts


def _mean(rng: random.Random) -> Draw:
    a, b, c = (rng.randint(1, 18) for _ in range(3))
    parts = [
        ("the sum of two", a, "+", b, "the first two make {}"),
        ("the sum of all", a + b, "+", c, "all of them make {}"),
        ("the mean", a + b + c, "/", 3, "the mean is {}"),
    ]
    return "mean", (a, b, c), f"Find the mean of ${a}$, ${b}$ and ${c}$.", parts


def _linear(rng: random.Random) -> Draw:
    a, x, b = rng.randint(2, 9), rng.randint(1, 12), rng.randint(1, 20)
    c = a * x + b
    parts = [(f"${a}x$", c, "-", b, f"${a}x={{}}$"), ("$x$", c - b, "/", a, "$x={}$")]
    return "linear", (a, b, c), f"Solve ${a}x+{b}={c}$ for $x$.", parts


def _evaluate(rng: random.Random) -> Draw:
    x, a, b, c = rng.randint(2, 9), rng.randint(2, 9), rng.randint(1, 12), rng.randint(1, 12)
    parts = [
        (f"${a}x$", a, "*", x, f"${a}x={{}}$"),
        (f"${a}x+{b}$", a * x, "+", b, f"${a}x+{b}={{}}$"),
        ("the value", a * x + b, "-", c, "the value is {}"),
    ]
    return "evaluate", (x, a, b, c), f"If $x={x}$, what is the value of ${a}x+{b}-{c}$?", parts


def _composition(rng: random.Random) -> Draw:
    a, b, c, x = rng.randint(2, 5), rng.randint(1, 15), rng.randint(1, 9), rng.randint(1, 9)
    parts = [
        (f"$g({x})$", x, "+", c, f"$g({x})={{}}$"),
        (f"${a}g({x})$", a, "*", x + c, f"${a}g({x})={{}}$"),
        (f"$f(g({x}))$", a * (x + c), "+", b, f"$f(g({x}))={{}}$"),
    ]
    return "composition", (a, b, c, x), f"Let $f(x)={a}x+{b}$ and $g(x)=x+{c}$. Find $f(g({x}))$.", parts


def _system(rng: random.Random) -> Draw:
    x, y = rng.randint(2, 20), rng.randint(1, 12)
    s, d = x + y, x - y
    parts = [
        ("$2x$", s, "+", d, "$2x={}$"),
        ("$x$", s + d, "/", 2, "$x={}$"),
        ("$y$", s, "-", x, "$y={}$"),
    ]
    unknown = rng.choice("xy")
    problem = f"If $x+y={s}$ and $x-y={d}$, find ${unknown}$."
    return "system", (s, d), problem, parts if unknown == "y" else parts[:2]


def _quadratic(rng: random.Random) -> Draw:
    x, b, c = rng.randint(2, 6), rng.randint(2, 6), rng.randint(1, 15)
    parts = [
        ("$x^2$", x, "*", x, "$x^2={}$"),
        (f"${b}x$", b, "*", x, f"${b}x={{}}$"),
        (f"$x^2+{b}x$", x * x, "+", b * x, f"$x^2+{b}x={{}}$"),
        ("the value", x * x + b * x, "+", c, "the value is {}"),
    ]
    return "quadratic", (x, b, c), f"Find the value of $x^2+{b}x+{c}$ at $x={x}$.", parts


def _dot(rng: random.Random) -> Draw:
    a, b, c, d = (rng.randint(1, 9) for _ in range(4))
    parts = [
        ("the first product", a, "*", c, "the first product is {}"),
        ("the second product", b, "*", d, "the second product is {}"),
        ("the sum", a * c, "+", b * d, "the sum is {}"),
    ]
    return "dot product", (a, b, c, d), f"Find the dot product of $({a},{b})$ and $({c},{d})$.", parts


def _determinant(rng: random.Random) -> Draw:
    a, b, c, d = (rng.randint(1, 9) for _ in range(4))
    parts = [
        ("the first product", a, "*", d, "the first product is {}"),
        ("the second product", b, "*", c, "the second product is {}"),
        ("the determinant", a * d, "-", b * c, "the determinant is {}"),
    ]
    problem = f"Find the determinant of the matrix with rows $({a},{b})$ and $({c},{d})$."
    return "determinant", (a, b, c, d), problem, parts


def _sequence(rng: random.Random) -> Draw:
    a, d, n = rng.randint(1, 20), rng.randint(2, 9), rng.randint(3, 10)
    parts = [
        ("the number of steps", n, "-", 1, "there are {} steps"),
        ("the change", n - 1, "*", d, "the change is {}"),
        (f"term ${n}$", a, "+", (n - 1) * d, f"term ${n}$ is {{}}"),
    ]
    return "sequence", (a, d, n), f"A sequence begins with ${a}$ and grows by ${d}$. Find term ${n}$.", parts


SUBJECTS: dict[str, tuple[Template, ...]] = {
    "algebra": (_linear, _evaluate),
    "counting_and_probability": (_outfits, _three_choices, _games),
    "geometry": (_perimeter, _side, _hole, _from_area),
    "intermediate_algebra": (_composition, _system, _quadratic),
    "number_theory": (_division, _base, _next_multiple),
    "prealgebra": (_order, _brackets, _mean),
    "precalculus": (_dot, _determinant, _sequence),
}
