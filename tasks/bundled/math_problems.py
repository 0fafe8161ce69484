"""Small problems of minerva_math's seven subjects, in the shape of its documents. Knows wording, not the split."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tasks.bundled.arithmetic import Sum, small
from tasks.bundled.split import Key
from tasks.bundled.wording import Line, fits, solution

LEVELS = 5


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


Numbers = tuple[int, ...]
Part = tuple[str, int, str, int, str]  # why, left, sign, right, so
Draw = tuple[str, Numbers, str, list[Part]]  # template, numbers, problem, parts
Maker = Callable[[random.Random], Draw]


def draw_math_problem(subject: str, source: random.Random) -> MathProblem:
    """Draws until all the sums are among those that are taught."""
    maker = source.choice(SUBJECTS[subject])
    while True:
        template, numbers, problem, parts = maker(source)
        if any(not small(left, sign, right) for _, left, sign, right, _ in parts):
            continue
        lines = [Line(why=why, sum=Sum(left, sign, right), so=so) for why, left, sign, right, so in parts]
        final = lines[-1].sum.result
        solved = f"{solution(lines, source)} The answer is $\\boxed{{{final}}}$."
        if not fits(solved):
            continue
        return MathProblem(
            key=("minerva_math", template, *numbers),
            subject=subject,
            problem=problem,
            level=_level(lines),
            solution=solved,
        )


def _level(lines: list[Line]) -> int:
    """More steps and larger numbers are harder."""
    large = max(max(line.sum.left, line.sum.result) for line in lines)
    return min(LEVELS, len(lines) - 1 + (large > 20) + (large > 40))


def _linear(source: random.Random) -> Draw:
    a, x, b = source.randint(2, 9), source.randint(1, 12), source.randint(1, 20)
    c = a * x + b
    parts = [(f"${a}x$", c, "-", b, f"${a}x={{}}$"), ("$x$", c - b, "/", a, "$x={}$")]
    return "linear", (a, b, c), f"Solve ${a}x+{b}={c}$ for $x$.", parts


def _evaluate(source: random.Random) -> Draw:
    x, a, b, c = source.randint(2, 9), source.randint(2, 9), source.randint(1, 12), source.randint(1, 12)
    parts = [
        (f"${a}x$", a, "*", x, f"${a}x={{}}$"),
        (f"${a}x+{b}$", a * x, "+", b, f"${a}x+{b}={{}}$"),
        ("the value", a * x + b, "-", c, "the value is {}"),
    ]
    return "evaluate", (x, a, b, c), f"If $x={x}$, what is the value of ${a}x+{b}-{c}$?", parts


def _outfits(source: random.Random) -> Draw:
    a, b, c = source.randint(2, 9), source.randint(2, 9), source.randint(2, 15)
    parts = [
        ("the number of pairs", a, "*", b, "there are {} pairs"),
        ("the number of ways", a * b, "+", c, "there are {} ways"),
    ]
    problem = f"A child wears one of {a} coats with one of {b} hats, or one of {c} suits. How many ways are there?"
    return "outfits", (a, b, c), problem, parts


def _three_choices(source: random.Random) -> Draw:
    a, b, c = source.randint(2, 6), source.randint(2, 5), source.randint(2, 6)
    parts = [
        ("the number of pairs", a, "*", b, "there are {} pairs"),
        ("the number of ways", a * b, "*", c, "there are {} ways"),
    ]
    problem = f"How many ways are there to choose one of {a} coats, one of {b} hats and one of {c} suits?"
    return "three choices", (a, b, c), problem, parts


def _handshakes(source: random.Random) -> Draw:
    n, k = source.randint(3, 8), source.randint(1, 20)
    parts = [
        ("twice the number of games", n, "*", n - 1, "twice the number of games is {}"),
        ("the number of games", n * (n - 1), "/", 2, "there are {} games"),
        ("the number in all", n * (n - 1) // 2, "+", k, "there are {} in all"),
    ]
    problem = f"Each two of {n} teams play one game. Then there are {k} more games. How many games are there in all?"
    return "games", (n, k), problem, parts


def _perimeter(source: random.Random) -> Draw:
    a, b = source.randint(2, 20), source.randint(2, 12)
    parts = [
        ("half the perimeter", a, "+", b, "half the perimeter is {}"),
        ("the perimeter", 2, "*", a + b, "the perimeter is {}"),
    ]
    return "perimeter", (a, b), f"A rectangle has sides ${a}$ and ${b}$. Find its perimeter.", parts


def _side(source: random.Random) -> Draw:
    a, b, c = source.randint(2, 15), source.randint(2, 15), source.randint(2, 20)
    p = a + b + c
    parts = [
        ("the sum of two sides", a, "+", b, "the two sides make {}"),
        ("the third side", p, "-", a + b, "the third side is {}"),
    ]
    problem = f"A triangle has perimeter ${p}$. Two of its sides are ${a}$ and ${b}$. Find the third side."
    return "third side", (a, b, p), problem, parts


def _hole(source: random.Random) -> Draw:
    a, b, s = source.randint(3, 12), source.randint(3, 9), source.randint(2, 4)
    parts = [
        ("the area of the rectangle", a, "*", b, "the rectangle has area {}"),
        ("the area of the square", s, "*", s, "the square has area {}"),
        ("the area left", a * b, "-", s * s, "the area left is {}"),
    ]
    problem = f"A square of side ${s}$ is cut from a rectangle with sides ${a}$ and ${b}$. Find the area left."
    return "hole", (s, a, b), problem, parts


def _from_area(source: random.Random) -> Draw:
    a, b = source.randint(2, 9), source.randint(2, 12)
    parts = [
        ("the other side", a * b, "/", a, "the other side is {}"),
        ("half the perimeter", a, "+", b, "half the perimeter is {}"),
        ("the perimeter", 2, "*", a + b, "the perimeter is {}"),
    ]
    return "from area", (a, b), f"A rectangle has area ${a * b}$ and one side ${a}$. Find its perimeter.", parts


def _composition(source: random.Random) -> Draw:
    a, b, c, x = source.randint(2, 5), source.randint(1, 15), source.randint(1, 9), source.randint(1, 9)
    parts = [
        (f"$g({x})$", x, "+", c, f"$g({x})={{}}$"),
        (f"${a}g({x})$", a, "*", x + c, f"${a}g({x})={{}}$"),
        (f"$f(g({x}))$", a * (x + c), "+", b, f"$f(g({x}))={{}}$"),
    ]
    return "composition", (a, b, c, x), f"Let $f(x)={a}x+{b}$ and $g(x)=x+{c}$. Find $f(g({x}))$.", parts


def _system(source: random.Random) -> Draw:
    x, y = source.randint(2, 20), source.randint(1, 12)
    s, d = x + y, x - y
    parts = [
        ("$2x$", s, "+", d, "$2x={}$"),
        ("$x$", s + d, "/", 2, "$x={}$"),
        ("$y$", s, "-", x, "$y={}$"),
    ]
    wanted = source.choice("xy")
    problem = f"If $x+y={s}$ and $x-y={d}$, find ${wanted}$."
    return "system", (s, d), problem, parts if wanted == "y" else parts[:2]


def _quadratic(source: random.Random) -> Draw:
    x, b, c = source.randint(2, 6), source.randint(2, 6), source.randint(1, 15)
    parts = [
        ("$x^2$", x, "*", x, "$x^2={}$"),
        (f"${b}x$", b, "*", x, f"${b}x={{}}$"),
        (f"$x^2+{b}x$", x * x, "+", b * x, f"$x^2+{b}x={{}}$"),
        ("the value", x * x + b * x, "+", c, "the value is {}"),
    ]
    return "quadratic", (x, b, c), f"Find the value of $x^2+{b}x+{c}$ at $x={x}$.", parts


def _remainder(source: random.Random) -> Draw:
    a, b, d = source.randint(5, 30), source.randint(2, 15), source.randint(3, 6)
    n = a + b
    q = n // d
    parts = [
        ("the sum", a, "+", b, "the sum is {}"),
        (f"a multiple of ${d}$", d, "*", q, f"{{}} is a multiple of ${d}$"),
        ("the remainder", n, "-", d * q, "the remainder is {}"),
    ]
    return "remainder", (a, b, d), f"Find the remainder when ${a}+{b}$ is divided by ${d}$.", parts


def _digit_sum(source: random.Random) -> Draw:
    a, b, k = source.randint(5, 40), source.randint(3, 15), source.randint(1, 15)
    n = a + b
    parts = [
        ("the sum", a, "+", b, "the sum is {}"),
        ("the sum of its digits", n // 10, "+", n % 10, "its digits make {}"),
        ("the number", n // 10 + n % 10, "+", k, "the number is {}"),
    ]
    return "digits", (a, b, k), f"Add ${k}$ to the sum of the digits of ${a}+{b}$.", parts


def _order(source: random.Random) -> Draw:
    a, b, c, d = source.randint(1, 20), source.randint(2, 9), source.randint(2, 9), source.randint(1, 15)
    parts = [
        ("the product", b, "*", c, "the product is {}"),
        ("the sum", a, "+", b * c, "the sum is {}"),
        ("the value", a + b * c, "-", d, "the value is {}"),
    ]
    return "order", (a, b, c, d), f"What is ${a}+{b}*{c}-{d}$?", parts


def _brackets(source: random.Random) -> Draw:
    a, b, c, d = source.randint(1, 9), source.randint(1, 9), source.randint(2, 6), source.randint(1, 15)
    parts = [
        ("the sum", a, "+", b, "the sum is {}"),
        ("the product", a + b, "*", c, "the product is {}"),
        ("the value", (a + b) * c, "-", d, "the value is {}"),
    ]
    return "brackets", (a, b, c, d), f"What is $({a}+{b})*{c}-{d}$?", parts


def _mean(source: random.Random) -> Draw:
    a, b, c = (source.randint(1, 18) for _ in range(3))
    parts = [
        ("the sum of two", a, "+", b, "the first two make {}"),
        ("the sum of all", a + b, "+", c, "all of them make {}"),
        ("the mean", a + b + c, "/", 3, "the mean is {}"),
    ]
    return "mean", (a, b, c), f"Find the mean of ${a}$, ${b}$ and ${c}$.", parts


def _dot(source: random.Random) -> Draw:
    a, b, c, d = (source.randint(1, 9) for _ in range(4))
    parts = [
        ("the first product", a, "*", c, "the first product is {}"),
        ("the second product", b, "*", d, "the second product is {}"),
        ("the sum", a * c, "+", b * d, "the sum is {}"),
    ]
    return "dot product", (a, b, c, d), f"Find the dot product of $({a},{b})$ and $({c},{d})$.", parts


def _determinant(source: random.Random) -> Draw:
    a, b, c, d = (source.randint(1, 9) for _ in range(4))
    parts = [
        ("the first product", a, "*", d, "the first product is {}"),
        ("the second product", b, "*", c, "the second product is {}"),
        ("the determinant", a * d, "-", b * c, "the determinant is {}"),
    ]
    problem = f"Find the determinant of the matrix with rows $({a},{b})$ and $({c},{d})$."
    return "determinant", (a, b, c, d), problem, parts


def _sequence(source: random.Random) -> Draw:
    a, d, n = source.randint(1, 20), source.randint(2, 9), source.randint(3, 10)
    parts = [
        ("the number of steps", n, "-", 1, "there are {} steps"),
        ("the change", n - 1, "*", d, "the change is {}"),
        (f"term ${n}$", a, "+", (n - 1) * d, f"term ${n}$ is {{}}"),
    ]
    return "sequence", (a, d, n), f"A sequence begins with ${a}$ and grows by ${d}$. Find term ${n}$.", parts


SUBJECTS: dict[str, tuple[Maker, ...]] = {
    "algebra": (_linear, _evaluate),
    "counting_and_probability": (_outfits, _three_choices, _handshakes),
    "geometry": (_perimeter, _side, _hole, _from_area),
    "intermediate_algebra": (_composition, _system, _quadratic),
    "number_theory": (_remainder, _digit_sum),
    "prealgebra": (_order, _brackets, _mean),
    "precalculus": (_dot, _determinant, _sequence),
}
