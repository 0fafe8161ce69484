"""Makers of small problems in minerva_math's subjects that need no letters. Each draws one problem, never checks it."""

import random

from tools.documents.math_parts import Draw, Maker


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


def _games(source: random.Random) -> Draw:
    n, k = source.randint(3, 8), source.randint(1, 20)
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


def _division(source: random.Random) -> Draw:
    d, q, k = source.randint(3, 9), source.randint(2, 12), source.randint(1, 15)
    r = source.randint(1, d - 1)
    parts = [
        ("the product", d, "*", q, "the product is {}"),
        ("the number", d * q, "+", r, "the number is {}"),
        ("the sum", d * q + r, "+", k, "the sum is {}"),
    ]
    problem = f"Divided by ${d}$ a number is ${q}$ with remainder ${r}$. Add ${k}$ to the number."
    return "division", (d, q, r, k), problem, parts


def _base(source: random.Random) -> Draw:
    base = source.randint(3, 9)
    a, b = source.randint(1, base - 1), source.randint(1, base - 1)
    parts = [
        ("the first part", a, "*", base, "the first part is {}"),
        ("the number", a * base, "+", b, "the number is {}"),
    ]
    return "base", (base, a, b), f"In base ${base}$ a number has the digits ${a}$ and ${b}$. Find the number.", parts


def _next_multiple(source: random.Random) -> Draw:
    d, q, k = source.randint(2, 9), source.randint(2, 10), source.randint(1, 15)
    parts = [
        ("the next multiple", d * q, "+", d, "the next multiple is {}"),
        ("the sum", d * q + d, "+", k, "the sum is {}"),
    ]
    return "next multiple", (d, q, k), f"Add ${k}$ to the first multiple of ${d}$ after ${d * q}$.", parts


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


PLAIN: dict[str, tuple[Maker, ...]] = {
    "counting_and_probability": (_outfits, _three_choices, _games),
    "geometry": (_perimeter, _side, _hole, _from_area),
    "number_theory": (_division, _base, _next_multiple),
    "prealgebra": (_order, _brackets, _mean),
}
