"""Makers of small problems in minerva_math's subjects that have letters. Each draws one problem, never checks it."""

import random

from tools.documents.math_parts import Draw, Maker


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


LETTERS: dict[str, tuple[Maker, ...]] = {
    "algebra": (_linear, _evaluate),
    "intermediate_algebra": (_composition, _system, _quadratic),
    "precalculus": (_dot, _determinant, _sequence),
}
